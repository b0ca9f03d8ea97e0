"""A config with which a step takes milliseconds, and the records of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder

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


def load_cpu_config(*args: Any, **options: Any) -> RunConfig:
    """Loads a config as `load_config` does, with the defaults of a CPU."""
    return with_device_defaults(load_config(*args, **options), "cpu")


def small_config(*overrides: str, steps: int = 6, ranks: int | None = 2) -> RunConfig:
    """The config has the defaults of a CPU."""
    return load_cpu_config(overrides=[*SMALL, *overrides], steps=steps, ranks=ranks)


def step_records(folder: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """The record of every step; if several attempts completed a step, the last one counts."""
    return {event["step"]: event for event in read_events(RunFolder(folder).events(rank)) if event["kind"] == "step"}
