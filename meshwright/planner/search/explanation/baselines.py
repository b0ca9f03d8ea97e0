"""The layouts that an engineer would try first, each with its best micro-batch, beside the plan; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.base.io import format_bytes
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import memory_by_class, memory_label
from meshwright.planner.search.candidate import Candidate, validation_error
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search_space import (
    ModelParallelDegrees,
    divisors,
    micro_batch_sizes,
    tensor_degree_divides,
)
from meshwright.planner.search.trainer_rules import trainer_rules

DDP, FSDP, FSDP_CHECKPOINTED, TENSOR_ZERO_1 = "DDP", "FSDP", "FSDP + full checkpointing", "tensor x ZeRO-1"


@dataclass(frozen=True)
class Baseline:
    """A well-known layout on all devices."""

    name: str
    estimate: Estimate | None
    """its best micro-batch, or the one with the least memory if none fits; None if the layout does not exist here"""
    reason: str = ""
    """why it cannot run; empty if it fits"""


def build_baselines(cache: CostCache) -> list[Baseline]:
    """Returns DDP, FSDP with and without activation checkpointing, and tensor parallelism with ZeRO-1."""
    ranks = cache.cluster.device_count
    return [
        baseline(cache, DDP, [Layout(replicate=ranks)], "none", ("none",)),
        baseline(cache, FSDP, [Layout(shard=ranks)], "parameters", ("none",)),
        baseline(cache, FSDP_CHECKPOINTED, [Layout(shard=ranks)], "parameters", ("full",)),
        baseline(cache, TENSOR_ZERO_1, list(tensor_layouts(cache)), "optimizer", ("none", "selective", "full")),
    ]


def tensor_layouts(cache: CostCache) -> Iterator[Layout]:
    """Yields the layouts with a tensor-parallel group inside a node, and ZeRO-1 over the other ranks."""
    ranks, per_node = cache.cluster.device_count, cache.cluster.devices_per_node
    if "tensor" in cache.work.model.axes:
        for tensor in divisors(ranks)[1:]:
            if tensor <= per_node and tensor_degree_divides(cache.work, tensor):
                yield Layout(shard=ranks // tensor, tensor=tensor)


def baseline(cache: CostCache, name: str, layouts: list[Layout], sharding: str, modes: tuple[str, ...]) -> Baseline:
    """Returns the fastest of these layouts with the first mode of activation checkpointing that fits."""
    work, rules = cache.work, trainer_rules(cache.work.trainer_name)
    modes = tuple(mode for mode in modes if mode in rules.checkpoint_modes)
    unsupported = sharding != "none" and sharding not in rules.shardings
    if unsupported or (name == TENSOR_ZERO_1 and "tensor" not in rules.axes) or not modes:
        return Baseline(name, None, f"it is not modelled for {work.trainer_name}")
    if not layouts:
        return Baseline(name, None, "the model does not divide over a tensor-parallel group inside a node")
    dividing = [layout for layout in layouts if work.global_batch % layout.data_degree == 0]
    if not dividing:
        ranks = min(layout.data_degree for layout in layouts)
        return Baseline(
            name, None, f"a global batch of {work.global_batch:,} does not divide over {ranks:,} data-parallel ranks"
        )
    fitting: list[Candidate] = []
    smallest: list[Candidate] = []
    reason = ""
    for layout in dividing:
        for mode in modes:
            candidates = list(micro_batches(cache, layout, sharding, mode))
            if not candidates or (error := validation_error(work, candidates[0])) is not None:
                reason = str(error) if candidates else "the pinned micro-batch does not divide"
                continue
            smallest.append(candidates[0])
            fits = [candidate for candidate in candidates if cache.fits(candidate)]
            fitting += fits
            if fits:
                break
    if fitting:
        return Baseline(name, min(map(cache.estimate, fitting), key=lambda plan: plan.seconds))
    if not smallest:
        return Baseline(name, None, reason)
    plan = min(map(cache.estimate, smallest), key=lambda plan: plan.peak_memory.total)
    return Baseline(name, plan, excess_message(cache, plan))


def micro_batches(cache: CostCache, layout: Layout, sharding: str, mode: str) -> Iterator[Candidate]:
    degrees = ModelParallelDegrees(1, 1, layout.tensor, 1, layout.data_degree, "ring")
    pinned = cache.work.pinned.get("batch.micro")
    work = cache.work if pinned is None else replace(cache.work, pinned={"batch.micro": pinned})
    for micro in micro_batch_sizes(work, degrees):
        offload = bool(cache.work.pinned.get("optimizer.cpu_offload", False))
        yield Candidate(layout, micro, sharding if layout.shard > 1 else "none", mode, offload=offload)


def excess_message(cache: CostCache, plan: Estimate) -> str:
    """Says how much memory a plan needs, how much is available, and what takes most of it."""
    name, largest = max(memory_by_class(plan.peak_memory).items(), key=lambda row: row[1])
    return (
        f"needs {format_bytes(plan.peak_memory.total)}, and {format_bytes(cache.memory_limit)} are available; the "
        f"largest part is {memory_label(name)}, {format_bytes(largest)}"
    )
