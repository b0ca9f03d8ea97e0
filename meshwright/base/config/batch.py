"""Derives the number of accumulation steps from the batch sizes and the data-parallel degree."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.config.constraints import nearest_multiples, nearest_values
from meshwright.base.config.run_config import BatchConfig
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """The batch sizes of a step: global_ = micro x replicas x accumulation."""

    global_: int
    """samples per optimizer step, over all ranks"""
    micro: int
    """samples per forward pass on one data-parallel rank"""
    replicas: int
    """data-parallel degree"""
    accumulation: int
    """micro-batches per optimizer step"""

    @property
    def local(self) -> int:
        """Samples per optimizer step on one data-parallel rank."""
        return self.micro * self.accumulation

    def __str__(self) -> str:
        factors = f"micro {self.micro} x data-parallel {self.replicas} x accumulation {self.accumulation}"
        return f"global {self.global_} = {factors}"


def derive_batch(batch: BatchConfig, replicas: int) -> Batch:
    """Derives accumulation from the global batch, the micro-batch and the data-parallel degree.

    Raises ConfigError if they do not divide, and names the values nearby that would.
    """
    total = batch.global_
    if total % replicas:
        degrees = [r for r in range(1, min(total, 4 * replicas, 4096) + 1) if total % r == 0]
        raise ConfigError(
            f"batch.global = {total} is not divisible by the data-parallel degree {replicas}",
            f"expected batch.global = {nearest_multiples(total, replicas)}, "
            f"or a data-parallel degree (layout.replicate or --ranks) of {nearest_values(degrees, replicas)}",
        )
    local = total // replicas
    micro = batch.micro or local
    if local % micro:
        sizes = [m for m in range(1, min(local, 4 * micro, 4096) + 1) if local % m == 0]
        raise ConfigError(
            f"batch.micro = {micro} does not divide the {local} samples of a rank "
            f"(batch.global = {total}, data-parallel degree {replicas})",
            f"expected batch.micro = {nearest_values(sizes, micro)}, "
            f"or batch.global = {nearest_multiples(total, replicas * micro)}",
        )
    return Batch(total, micro, replicas, local // micro)
