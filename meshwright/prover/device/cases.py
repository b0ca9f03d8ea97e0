"""The runs that are proven on a device: every axis, on two and four ranks, in each precision, compiled and not. It is
torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from meshwright.config import LayoutConfig, RunConfig
from meshwright.prover.shrink.runs import DEVICE, ProofRun, changes, is_valid
from meshwright.prover.shrink.sizes import min_blocks, shrink
from meshwright.topology.layout import Layout

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
    variants = product(LAYOUTS, PRECISIONS, (False, True))
    proofs = (device_run(config, axis, ranks, compute, compiled) for axis, compute, compiled in variants)
    return [ProofRun("on CUDA", proof, changes(config, proof)) for proof in proofs if is_valid(proof)]


def device_run(config: RunConfig, axis: str, ranks: int, compute: Literal["fp32", "bf16"], compiled: bool) -> RunConfig:
    """The config in small sizes on one axis. It saves no checkpoints and evaluates nothing, which the other proof runs
    do.
    """
    layout_config = LAYOUTS[axis](ranks)
    layout = Layout.from_config(layout_config)
    if layout.expert > 1 and not config.model.experts:
        config = replace(config, model=replace(config.model, experts=EXPERTS, experts_active=EXPERTS_ACTIVE))
    proof = shrink(config, layout_config, DEVICE)
    return replace(
        proof,
        model=replace(proof.model, layers=max(BLOCKS, min_blocks(config, layout)), capacity_factor=0.0),
        precision=replace(proof.precision, compute=compute, tf32=False),
        compile=replace(proof.compile, enabled=compiled),
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
