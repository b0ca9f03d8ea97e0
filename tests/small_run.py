"""A config with which a step takes milliseconds."""

from __future__ import annotations

from meshwright.config import RunConfig, load_config

SMALL = [
    "--model.width=32",
    "--model.layers=2",
    "--model.ffn=48",
    "--data.sequence=16",
    "--data.kind=synthetic",
    "--data.samples=500",
    "--schedule.warmup=2",
    "--launch.device=cpu",
    "--launch.collective_timeout=60",
]


def small_config(*overrides: str, steps: int = 6, ranks: int | None = 2) -> RunConfig:
    return load_config(overrides=[*SMALL, *overrides], steps=steps, ranks=ranks)
