"""The runs that are proven on a device: every axis, on two and four ranks, in each precision, compiled and not. It is
torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from meshwright.base.config import LayoutConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.layout import Layout
from meshwright.prover.shrink.runs import DEVICE, ProofRun, changes, is_valid
from meshwright.prover.shrink.sizes import min_blocks, shrink

RANKS = (2, 4)
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
LAYOUTS = {
    "DDP": lambda ranks: LayoutConfig(replicate=ranks),
    "FSDP2": lambda ranks: LayoutConfig(replicate=ranks, shard="parameters"),
    "TP": lambda ranks: LayoutConfig(replicate=1, tensor=ranks),
    "PP": lambda ranks: LayoutConfig(replicate=1, pipeline=ranks),
    "CP": lambda ranks: LayoutConfig(replicate=1, context=ranks),
    "EP": lambda ranks: LayoutConfig(replicate=ranks, expert=ranks),
}
"""Axis -> the layout in which it alone divides the ranks; expert parallelism reuses those of data parallelism."""
EXPERTS, EXPERTS_ACTIVE = 8, 2
"""Experts of a model without experts, where expert parallelism is proven."""
BLOCKS = 2


def device_runs(config: RunConfig, ranks: int) -> list[ProofRun]:
    """The runs on this number of ranks that the model supports; runs of one layout follow each other."""
    runs = []
    for axis, compute, compiled in product(LAYOUTS, PRECISIONS, (False, True)):
        proof = device_run(config, axis, ranks, compute, compiled)
        name = f"{axis} on CUDA, {ranks} ranks, {compute}" + (", compiled" if compiled else "")
        if is_valid(proof):
            runs.append(ProofRun(name, proof, changes(config, proof)))
    return runs


def device_run(config: RunConfig, axis: str, ranks: int, compute: Literal["fp32", "bf16"], compiled: bool) -> RunConfig:
    """The config in small sizes on one axis. It saves no checkpoints and evaluates nothing, which the other proof runs
    do.
    """
    layout_config = LAYOUTS[axis](ranks)
    layout = Layout.from_config(layout_config)
    if layout.expert > 1 and not config.model.experts:
        config = replace(config, model=replace(config.model, experts=EXPERTS, experts_active=EXPERTS_ACTIVE))
    precision = replace(config.precision, compute=compute, weights=None, residual=None, float8=False, tf32=False)
    compiled_or_not = replace(config.compile, enabled=compiled)
    config = with_device_defaults(replace(config, precision=precision, compile=compiled_or_not), "cuda")
    proof = shrink(config, layout_config, DEVICE)
    return replace(
        proof,
        model=replace(proof.model, layers=max(BLOCKS, min_blocks(config, layout)), capacity_factor=0.0),
        eval=replace(proof.eval, every=0),
        checkpoint=replace(proof.checkpoint, mode="off"),
        launch=replace(proof.launch, device="cuda"),
        count_bytes_every=0,
    )


def unsupported_axes(config: RunConfig) -> Iterator[str]:
    """The axes that the model does not support on any number of ranks."""
    for axis in LAYOUTS:
        if not any(is_valid(device_run(config, axis, ranks, PRECISIONS[0], False)) for ranks in RANKS):
            yield axis
