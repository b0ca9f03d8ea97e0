"""The rows of the GPU benchmark: what is timed against what, on which models, and the target of the ratio."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu.meshwright_contender import MeshwrightLoop, UnobservedLoop, WrappedLoop
from benchmarks.gpu.plain_loops import BestLoop, EagerLoop
from benchmarks.gpu.shapes import DENSE, EXPERTS, Shape
from benchmarks.gpu.timing import Contender
from benchmarks.gpu.transformers_contenders import AccelerateLoop, LightningLoop
from meshwright.core.kernels.triton_runtime import runs_triton

Make = Callable[[Shape, torch.device], Contender]
ALL = ("a", "b", "c")


@dataclass(frozen=True)
class Side:
    """One side of a pair. Without `make` it is Meshwright as it is by default, which stays built between rows."""

    title: str
    make: Make | None = None
    shape: Shape | None = None
    """a model of its own instead of that of the row"""
    settings: tuple[str, ...] | None = None
    """settings of the run file, for the planner's prediction; None: the planner knows no such run"""


DEFAULT = Side("Meshwright", settings=())


@dataclass(frozen=True)
class PairRow:
    """Two contenders that take turns. The ratio is the speed of the first relative to the second."""

    name: str
    first: Side
    second: Side
    models: tuple[str, ...] = ALL
    min_speed: dict[str, float] = field(default_factory=dict)
    """model -> the smallest ratio of speed that is a success"""
    min_speed_to: dict[str, float] = field(default_factory=dict)
    """row -> the smallest speed relative to the second side of that row; both rows are relative to Meshwright"""
    max_memory: dict[str, float] = field(default_factory=dict)
    """model -> the largest ratio of peak memory that is a success"""
    packages: tuple[str, ...] = ()
    needs_triton: bool = False
    setup_seconds: float = 12.0
    """what building and compiling takes on an H200, for `--budget`"""
    by_utilization: bool = False
    """whether the ratio is that of the utilization instead of the speed, for models that differ"""
    is_close: bool = False
    """whether the target is within the noise of a round, so that the row has twice as many"""
    apart: tuple[str, ...] = ()
    """models that do not fit into memory twice: each side is built anew for its turn"""

    def rounds(self, rounds: int) -> int:
        """The rounds of this row where `rounds` are asked for."""
        return 2 * rounds if self.is_close and rounds > 1 else rounds

    def missing(self, device: torch.device) -> list[str]:
        """What this row needs and is not there: packages, and Triton for the device."""
        packages = [package for package in self.packages if importlib.util.find_spec(package) is None]
        return packages + [f"Triton for {device.type}"] * (self.needs_triton and not runs_triton(device))


def variant(title: str, *settings: str) -> Side:
    """Meshwright with settings of the run file."""
    return Side(f"Meshwright, {title}", partial(MeshwrightLoop, settings=settings), settings=settings)


def accelerate(title: str, compile_: str) -> Side:
    return Side(f"transformers + accelerate{title}", partial(AccelerateLoop, compile_=compile_))


HF = ("transformers", "accelerate")
REGIONAL, WHOLE = accelerate(", regional compile", "regional"), accelerate(", compiled", "model")
TRANSFORMERS = Side("Meshwright, transformers Llama", partial(MeshwrightLoop, transformers=True))
FULL, SELECTIVE = "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"
AT_MOST = {percent: 1 / (1 + percent / 100) for percent in (0.5, 2.5, 5, 9, 20)}
"""percent by which a step may be longer -> ratio of speed"""

PAIRS = (
    PairRow(
        "best",
        DEFAULT,
        Side("best plain loop", BestLoop),
        ALL,
        dict.fromkeys(ALL, 1.0),
        max_memory=dict.fromkeys(ALL, 1.0),
        needs_triton=True,
        is_close=True,
    ),
    PairRow("eager", DEFAULT, Side("plain eager loop", EagerLoop), setup_seconds=4),
    PairRow(
        "accelerate",
        DEFAULT,
        accelerate("", "none"),
        ALL,
        {"a": 2.5, "b": 1.45, "c": 1.28},
        packages=HF,
        setup_seconds=5,
        apart=("c",),
    ),
    PairRow("accelerate-regional", DEFAULT, REGIONAL, ALL, {"b": 1.15}, packages=HF, setup_seconds=15, apart=("c",)),
    PairRow("accelerate-compiled", DEFAULT, WHOLE, packages=HF, setup_seconds=45, apart=("c",)),
    PairRow(
        "lightning",
        DEFAULT,
        Side("Lightning + transformers", LightningLoop),
        packages=("transformers", "pytorch_lightning"),
        setup_seconds=8,
        apart=("c",),
    ),
    PairRow(
        "transformers",
        TRANSFORMERS,
        DEFAULT,
        ("b",),
        min_speed_to={"accelerate": 1.2, "accelerate-regional": 1.05},
        packages=HF,
        setup_seconds=20,
    ),
    PairRow("float8", variant("float8", "precision.float8=true"), DEFAULT, ("b", "c"), {"b": 1.12, "c": 1.20}),
    PairRow(
        "ddp",
        Side("Meshwright, DDP", partial(WrappedLoop, shard=False)),
        DEFAULT,
        ("b",),
        {"b": AT_MOST[0.5]},
        is_close=True,
    ),
    PairRow(
        "fsdp",
        Side("Meshwright, FSDP2", partial(WrappedLoop, shard=True)),
        DEFAULT,
        ("b", "c"),
        dict.fromkeys("bc", AT_MOST[2.5]),
        is_close=True,
    ),
    PairRow(
        "observation",
        DEFAULT,
        Side("Meshwright, nothing observed", UnobservedLoop),
        ("a", "b"),
        dict.fromkeys("ab", AT_MOST[0.5]),
        is_close=True,
    ),
    PairRow(
        "deterministic", variant("deterministic", "precision.deterministic=true"), DEFAULT, ("b",), {"b": AT_MOST[5]}
    ),
    PairRow("checkpointing-full", variant("activation checkpointing, full", FULL), DEFAULT, ("b",), {"b": AT_MOST[20]}),
    PairRow(
        "checkpointing-selective",
        variant("activation checkpointing, selective", SELECTIVE),
        DEFAULT,
        ("b",),
        {"b": AT_MOST[9]},
        max_memory={"b": 0.7},
    ),
    PairRow("memory-budget", variant("memory budget 0.5", "activation_checkpoint.memory_budget=0.5"), DEFAULT, ("b",)),
    PairRow("residual-fp32", variant("float32 residual stream", "precision.residual=fp32"), DEFAULT, ("b",)),
    PairRow(
        "experts",
        Side("Meshwright, 16 experts, top 2", MeshwrightLoop, EXPERTS, ()),
        Side("Meshwright, dense of the same active size", MeshwrightLoop, DENSE, ()),
        ("b",),
        {"b": 0.7},
        setup_seconds=30,
        by_utilization=True,
    ),
)
