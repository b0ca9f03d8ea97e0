"""The search space: the parallel degrees that divide the model and the devices, and the settings that go with them.

Divisibility is checked against the model here, for Meshwright's own decoder and for other models alike. All further
rules are checked on each complete candidate (`validation_error`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import lcm

from meshwright.base.models.registry import run_spec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES, find_schedule
from meshwright.planner.search.trainer_rules import trainer_rules
from meshwright.planner.workload.workload import Workload

CHECKPOINT_MODES = ("none", "selective", "full")
"""Modes of activation checkpointing, from the fastest with the most memory to the slowest with the least."""
MIN_SEQUENCE_CHUNK = 512
"""The fewest tokens of a sequence per rank under context parallelism: smaller matrices leave a device idle."""
MAX_MICRO_BATCH_TOKENS = 1 << 16
"""The tokens of one micro-batch on one rank beyond which larger matrices gain nothing."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may use in addition to data parallelism. The ladder widens the space step by step."""

    axes: frozenset[str] = frozenset(("shard", "tensor", "pipeline", "context", "expert"))
    checkpoint_modes: tuple[str, ...] = CHECKPOINT_MODES
    max_tensor_degree: int | None = None
    """The largest tensor-parallel group; None means the devices of a node."""
    offload: bool = False
    """Whether optimizer state is in host memory."""
    may_offload: bool = True
    """Whether a search for which nothing fits goes on with optimizer state in host memory."""

    def of_trainer(self, work: Workload) -> SearchSpace:
        """Returns the part of this space that the trainer of a workload supports, with the pinned offload."""
        rules = trainer_rules(work.trainer_name)
        modes = tuple(mode for mode in self.checkpoint_modes if mode in rules.checkpoint_modes)
        offload = bool(work.pinned.get("optimizer.cpu_offload", self.offload))
        return replace(self, axes=self.axes & rules.axes, checkpoint_modes=modes or ("none",), offload=offload)


@dataclass(frozen=True)
class ModelParallelDegrees:
    """The degrees of the axes that divide the model or a sequence; the remaining ranks are data-parallel."""

    pipeline: int
    context: int
    tensor: int
    expert: int
    data: int
    context_method: str


@cache
def divisors(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def tensor_degree_divides(work: Workload, degree: int) -> bool:
    """Whether the model divides evenly over a tensor-parallel group of this size.

    A vocabulary may be padded, except in Meshwright's own decoder.
    """
    model = work.model
    if isinstance(model, TracedModel):
        return model.tensor_degree_divides(degree)
    sizes = [model.heads, model.kv_heads, model.ffn, work.sequence]
    sizes += [model.expert_ffn] * (model.experts > 0) + [model.vocab] * (work.base_config is not None)
    return all(size % degree == 0 for size in sizes)


def model_parallel_degrees(
    work: Workload, ranks: int, devices_per_node: int, space: SearchSpace
) -> Iterator[ModelParallelDegrees]:
    """Yields every combination of degrees that divides the ranks, the batch, the model and the sequence.

    The tensor axis is innermost, so tensor-parallel groups lie inside a node where possible.
    """
    model, pinned, axes = work.model, work.pinned, space.axes & work.model.axes
    max_tensor = space.max_tensor_degree or devices_per_node
    for tensor in permitted_degrees(divisors(ranks), "tensor" in axes, pinned.get("layout.tensor")):
        if (tensor > max_tensor and "layout.tensor" not in pinned) or not tensor_degree_divides(work, tensor):
            continue
        for pipeline in permitted_degrees(divisors(ranks // tensor), "pipeline" in axes, pinned.get("layout.pipeline")):
            if pipeline > model.layers:
                continue
            rest = ranks // tensor // pipeline
            for context in permitted_degrees(divisors(rest), "context" in axes, pinned.get("layout.context")):
                data = rest // context
                too_short = context > 1 and work.sequence // context < MIN_SEQUENCE_CHUNK and not pinned
                if work.global_batch % data or too_short:
                    continue
                for method in context_methods(work, context, tensor):
                    for expert in expert_degrees(work, data * context, "expert" in axes):
                        yield ModelParallelDegrees(pipeline, context, tensor, expert, data, method)


def permitted_degrees(degrees: list[int], axis_is_free: bool, pin: int | str | bool | None) -> list[int]:
    """Returns the pinned degree if there is one, all degrees if the axis may be used, and the smallest otherwise."""
    if pin is not None:
        return [int(pin)] if int(pin) in degrees else []
    return degrees if axis_is_free else degrees[:1]


def context_methods(work: Workload, context: int, tensor: int) -> Iterator[str]:
    """Yields the methods of context parallelism that compute the model's attention and divide the sequence evenly;
    without the axis there is one.
    """
    if context == 1:
        yield "ring"
        return
    if work.trainer is not None:
        if work.sequence % (context * lcm(2, tensor)) == 0:
            yield work.trainer.context_method
        return
    pin = work.pinned.get("context.method")
    divides = work.sequence % (context * lcm(2, tensor)) == 0
    if divides and attention_is_plain(work) and pin in (None, "ring"):
        yield "ring"
    divides = work.sequence % (context * tensor) == 0 and work.model.heads % (context * tensor) == 0
    if divides and pin in (None, "all-to-all"):
        yield "all-to-all"


def attention_is_plain(work: Workload) -> bool:
    """Whether ring attention, which computes plain attention, is that of the model's family."""
    if work.base_config is None or isinstance(work.model, TracedModel):
        return True
    return run_spec(work.base_config).attention.is_plain


def expert_degrees(work: Workload, data_and_context_ranks: int, axis_is_free: bool) -> list[int]:
    if not work.model.experts:
        return [1] if work.pinned.get("layout.expert", 1) == 1 else []
    dividing = [degree for degree in divisors(work.model.experts) if data_and_context_ranks % degree == 0]
    return permitted_degrees(dividing, axis_is_free, work.pinned.get("layout.expert"))


def sharded_layouts(
    work: Workload, degrees: ModelParallelDegrees, space: SearchSpace
) -> Iterator[tuple[str, tuple[Layout, ...]]]:
    """Yields (sharding, layouts), where the layouts go from the smallest shard group to the largest."""
    pinned, data = work.pinned, degrees.data
    replicated = Layout(degrees.pipeline, data, 1, degrees.context, degrees.tensor, degrees.expert)
    pinned_sharding = pinned.get("layout.shard")
    replicate, shard_degree = pinned.get("layout.replicate"), pinned.get("layout.shard_degree")
    if pinned_sharding in (None, "none") and shard_degree in (None, 1) and replicate in (None, data):
        yield "none", (replicated,)
    rules = trainer_rules(work.trainer_name)
    for sharding in rules.shardings if "shard" in space.axes or pinned_sharding else ():
        if pinned_sharding not in (None, sharding):
            continue
        if sharding == "gradients" and degrees.pipeline > 1 and not rules.shards_gradients_in_pipeline:
            continue
        if sharding == "parameters" and degrees.pipeline > 1 and not rules.shards_in_pipeline:
            continue
        layouts = (
            replace(replicated, replicate=data // shards, shard=shards)
            for shards in divisors(data)[1:]
            if shard_degree in (None, shards)
            and (
                replicate is None or replicate == (data if shard_degree is None and shards == data else data // shards)
            )
        )
        if divisible := tuple(layout for layout in layouts if layout.expert_axes_size % layout.expert == 0):
            yield sharding, divisible


def micro_batch_sizes(work: Workload, degrees: ModelParallelDegrees) -> list[int]:
    """Returns sizes of a micro-batch in ascending order, each at least 1.5 times the one before."""
    local_batch = work.global_batch // degrees.data
    if (pin := work.pinned.get("batch.micro")) is not None:
        return [int(pin)] if local_batch % int(pin) == 0 else []
    tokens = work.sequence // degrees.context
    sizes = [1]
    for micro in divisors(local_batch):
        if micro * tokens <= MAX_MICRO_BATCH_TOKENS and micro >= 1.5 * sizes[-1]:
            sizes.append(micro)
    return sizes


def pipeline_schedules(work: Workload, pipeline: int) -> list[tuple[str, int]]:
    """Returns (schedule, stages per rank), the schedules with a fixed number of stages first.

    GPipe needs more memory than 1F1B for the same bubble, so it serves steps with too few micro-batches for 1F1B.
    """
    if pipeline == 1:
        return [("1f1b", 1)]
    pinned_schedule, pinned_stages = work.pinned.get("pipeline.schedule"), work.pinned.get("pipeline.stages")
    simplest_first = sorted(
        SCHEDULES.values(), key=lambda row: (row.max_stages is None, row.v_shaped, row.all_forward_first)
    )
    options = [(schedule.name, stages) for schedule in simplest_first for stages in schedule.candidate_stages]
    # Other trainers may leave the first stage to the embedding and the last one to the head, as Llama 3's does.
    max_stages = (work.model.layers + (2 if work.trainer is not None else 0)) // pipeline
    supported = trainer_rules(work.trainer_name).schedules or tuple(SCHEDULES)
    return [
        (name, stages)
        for name, stages in options
        if stages <= max_stages
        and name in supported
        and pinned_schedule in (None, name)
        and pinned_stages in (None, stages)
    ]


def fills_schedule(name: str, pipeline: int, micro_batches: int) -> bool:
    """Whether a step has enough micro-batches for a schedule, and a divisible number where the schedule requires it.

    With fewer micro-batches the bubble is as large as GPipe's, which is kept for such steps.
    """
    schedule = find_schedule(name)
    if micro_batches < schedule.fill_micro_batches(pipeline):
        return False
    return not schedule.even_rounds or micro_batches % max(1, micro_batches // pipeline) == 0
