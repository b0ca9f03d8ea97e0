"""Hybrid layouts on two to eight ranks, for tests: single axes, pairs of axes, and the meshes of large runs."""

from __future__ import annotations

from meshwright.base.config import RunConfig
from meshwright.base.hardware.cluster import Cluster, Device, Link
from meshwright.base.topology.schedules import SCHEDULES
from tests.kit.small_run import load_cpu_config

CONFIG_KEYS = {
    "schedule": "pipeline.schedule",
    "stages": "pipeline.stages",
    "method": "context.method",
    "keep": "fsdp.reshard_after_forward",
    "degree": "layout.shard_degree",
    "recompute": "activation_checkpoint.mode",
    "segment": "activation_checkpoint.segment",
    "offload": "optimizer.cpu_offload",
    "optimizer": "optimizer.kind",
    "implementation": "optimizer.implementation",
    "weights": "precision.weights",
    "window": "model.options.window",
    "lora": "lora.rank",
}
MODEL_KEYS = ("family", "layers", "heads", "kv_heads", "ffn", "experts", "experts_shared", "separator")

SINGLE_AXES = [
    *(f"pipeline={ranks} schedule={kind}" for ranks in (2, 4, 8) for kind in SCHEDULES),
    "pipeline=4 schedule=zero-bubble stages=1",
    "pipeline=2 schedule=interleaved layers=4 separator=0 recompute=selective",
    *(f"context={ranks} method={method} heads=8" for ranks in (2, 4, 8) for method in ("ring", "all-to-all")),
    "context=4 method=all-to-all heads=8 kv_heads=1 recompute=selective",
    *(f"replicate={ranks} expert={ranks} experts=8" for ranks in (2, 4, 8)),
    *(f"replicate={ranks} shard=parameters expert={ranks} experts=8" for ranks in (2, 4, 8)),
    "replicate=4 expert=2 experts=4",
    "replicate=4 shard=parameters expert=2 experts=4 experts_shared=1 recompute=full",
]
TWO_AXES = [
    "replicate=2 pipeline=2",
    "replicate=2 pipeline=2 schedule=zbv",
    "replicate=2 shard=optimizer pipeline=2 schedule=zero-bubble",
    "replicate=2 shard=optimizer pipeline=4 schedule=interleaved offload=true",
    "replicate=2 shard=parameters pipeline=2 recompute=full",
    "replicate=2 shard=parameters pipeline=2 schedule=interleaved",
    "replicate=2 shard=parameters keep=false pipeline=2 schedule=dualpipev",
    "tensor=2 pipeline=2",
    "tensor=2 pipeline=2 schedule=zero-bubble",
    "tensor=2 pipeline=2 schedule=zbv",
    "tensor=2 pipeline=2 schedule=dualpipev",
    "context=2 pipeline=2 separator=0",
    "context=2 pipeline=2 method=all-to-all schedule=interleaved",
    "context=2 pipeline=2 schedule=zbv",
    "replicate=2 context=2",
    "replicate=2 context=2 method=all-to-all recompute=full",
    "replicate=2 shard=optimizer context=2",
    "replicate=2 shard=gradients context=2 method=all-to-all",
    "replicate=2 shard=parameters context=2 offload=true",
    "context=2 tensor=2",
    "context=2 tensor=2 method=all-to-all heads=8 recompute=selective",
    "replicate=2 shard=optimizer expert=2 experts=4",
    "replicate=2 shard=gradients expert=2 experts=4 offload=true",
    "replicate=2 tensor=2 expert=2 experts=4 experts_shared=1",
    "context=2 expert=2 experts=4",
    "context=4 expert=2 experts=4 method=all-to-all heads=8 experts_shared=1",
    "replicate=2 pipeline=2 expert=2 experts=4",
    "replicate=2 pipeline=2 schedule=zbv expert=2 experts=4 experts_shared=1",
    "pipeline=2 tensor=2 experts=4 experts_shared=1",
]
SEVERAL_AXES = [
    "replicate=2 tensor=2 pipeline=2",
    "replicate=2 tensor=2 pipeline=2 schedule=zero-bubble",
    "replicate=2 shard=parameters tensor=2 pipeline=2 schedule=interleaved",
    "replicate=2 shard=parameters tensor=2 context=2",
    "replicate=2 shard=gradients tensor=2 context=2 method=all-to-all heads=8",
    "replicate=2 degree=2 shard=parameters pipeline=2",
    "replicate=2 degree=2 shard=parameters context=2",
    "replicate=2 degree=2 shard=optimizer context=2 method=all-to-all",
    "replicate=2 degree=2 shard=parameters expert=2 experts=4",
    "replicate=2 degree=4 shard=parameters expert=2 experts=4",
    "replicate=2 shard=parameters pipeline=2 expert=2 experts=4 experts_shared=1",
    "replicate=2 shard=parameters context=2 expert=2 experts=4",
    "replicate=2 shard=parameters context=2 expert=4 experts=4 method=all-to-all separator=0",
    "replicate=2 context=2 expert=4 experts=4 recompute=full layers=3 segment=2",
    "replicate=2 shard=parameters tensor=2 expert=2 experts=4 experts_shared=1 recompute=full",
    "replicate=2 shard=optimizer pipeline=2 context=2 schedule=zbv",
    "context=2 pipeline=2 tensor=2",
    "context=2 pipeline=2 tensor=2 method=all-to-all schedule=zero-bubble heads=8",
    "context=2 pipeline=2 expert=2 experts=4 schedule=interleaved",
    "context=2 tensor=2 expert=2 experts=4 method=all-to-all heads=8",
    "replicate=2 pipeline=2 tensor=2 expert=2 experts=4 experts_shared=1",
    "replicate=2 shard=parameters pipeline=2 context=2 expert=2 experts=4 schedule=interleaved",
    "replicate=2 shard=parameters context=2 tensor=2 expert=4 experts=4",
]
HYBRIDS = [*SINGLE_AXES, *TWO_AXES, *SEVERAL_AXES]


def overrides_of(row: str) -> list[str]:
    """A row as command-line overrides, with replicate = 1 by default and one block per stage."""
    settings = {"replicate": "1"} | dict(item.split("=") for item in row.split())
    stages = settings.get("stages") or SCHEDULES[settings.get("schedule", "1f1b")].default_stages
    settings.setdefault("layers", str(max(2, int(settings.get("pipeline", 1)) * int(stages))))
    return [f"--{config_key(name)}={value}" for name, value in settings.items()]


def config_key(name: str) -> str:
    return f"model.{name}" if name in MODEL_KEYS else CONFIG_KEYS.get(name, f"layout.{name}")


MICRO = 2
SHAPE = {"vocab": 512, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160}
"""With sequences of 128 tokens, activations are about half of the memory."""
LINK = Link(1e9, 1e-5)
MACHINE = Cluster("cpu", Device("cpu", 1e12, 1e10, {"bf16": 1e11, "fp32": 1e11}, is_cpu=True), 8, 1, LINK, LINK)


def balanced_config(row: str) -> RunConfig:
    """A row of the matrix as a config with about as much activation as parameter memory. A row may also set
    `precision=` and `accumulation=`.
    """
    settings = dict(item.split("=") for item in row.split())
    precision, accumulation_setting = settings.pop("precision", "fp32"), settings.pop("accumulation", None)
    given = overrides_of(" ".join(f"{name}={value}" for name, value in settings.items()))
    shape = [f"--model.{name}={size}" for name, size in SHAPE.items() if name not in settings]
    pipeline, data = (
        int(settings.get("pipeline", 1)),
        int(settings.get("replicate", 1)) * int(settings.get("degree", 1)),
    )
    accumulation = int(accumulation_setting) if accumulation_setting else 2 * pipeline if pipeline > 1 else 2
    batch = [f"--batch.micro={MICRO}", f"--batch.global={data * accumulation * MICRO}"]
    return load_cpu_config(
        overrides=[*shape, *given, *batch, "--data.sequence=128", f"--precision.compute={precision}"]
    )
