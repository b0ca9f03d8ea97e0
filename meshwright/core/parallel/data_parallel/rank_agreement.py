"""Detects ranks that run a model differently in one step: with other parameters, or blocks in another order."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from torch import nn

from meshwright.errors import NumericsError


class BlockCalls:
    """Hashes the order in which a rank calls its blocks. Each is an FSDP unit, and ranks that call different ones at
    the same time all-gather shards of different weights.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.hash = 0
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self.record, index))

    def record(self, index: int, _block: nn.Module, _inputs: object) -> None:
        self.hash = zlib.crc32(index.to_bytes(4, "little"), self.hash)

    def pop(self) -> int:
        """Returns the hash of the calls since the last `pop`."""
        calls, self.hash = self.hash, 0
        return calls


class ModelUse(NamedTuple):
    """How a rank ran the model in a step."""

    parameters: int = 0
    """hash of the parameters with a gradient; 0 if all have one"""
    block_calls: int = 0
    """hash of the order in which the blocks were called; 0 without FSDP2"""

    @property
    def short(self) -> int:
        """Both in 16 bits, so that the sum of squares over all ranks has no overflow."""
        return (self.parameters ^ self.block_calls) & 0xFFFF


def use_error(uses: list[ModelUse], pipeline_ranks: list[int], step: int) -> NumericsError | None:
    """The error if ranks with the same stages ran the model differently in a step; `uses` is by rank."""
    first = {stage: rank for rank, stage in reversed(list(enumerate(pipeline_ranks)))}
    for rank, stage in enumerate(pipeline_ranks):
        other = first[stage]
        if uses[rank].block_calls != uses[other].block_calls:
            return NumericsError(
                f"rank {rank} step {step}: blocks of the model were called in another order than on rank {other}, so "
                "shards of different weights were all-gathered",
                "expected every rank to call the same blocks in the same order; try ParallelSpec(blocks=...) with "
                "modules that contain these, or layout.shard = none",
            )
    for rank, stage in enumerate(pipeline_ranks):
        other = first[stage]
        if uses[rank].parameters != uses[other].parameters:
            return NumericsError(
                f"rank {rank} step {step}: ranks used different parameters (rank {other} used others), so gradients of "
                "different parameters were summed",
                "try ddp.find_unused_parameters = true",
            )
    return None
