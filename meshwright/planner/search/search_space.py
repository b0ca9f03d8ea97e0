"""Which ways to spread a step there are: degrees that divide, schedules that fill, pins kept; torch-free.

Divisibility is asked of the model here, for models of our own decoder and others alike. What is more than that
(`refused`) is asked of each whole choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import lcm

from meshwright.planner.workload.workload import Workload
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES, find_schedule

SHARDINGS = ("optimizer", "gradients", "parameters")
CHECKPOINT_MODES = ("none", "selective", "full")
"""From the quickest, which holds most, to the one that holds least."""
MIN_SEQUENCE_CHUNK = 512
"""Tokens of a sequence that a rank has at least under context: smaller matrices leave a device idle."""
MAX_MICRO_BATCH_TOKENS = 1 << 16
"""Tokens of one pass on one rank beyond which larger matrices gain nothing."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may use beside whole copies. The ladder widens it rung by rung."""

    axes: frozenset[str] = frozenset(("shard", "tensor", "pipeline", "context", "expert"))
    recompute: tuple[str, ...] = CHECKPOINT_MODES
    tensor: int | None = None
    """ranks of a tensor group at most; none: the devices of a node"""


@dataclass(frozen=True)
class ModelParallelDegrees:
    """The degrees of the axes that cut the model or a sequence; the rest of the ranks have samples of their own."""

    pipeline: int
    context: int
    tensor: int
    expert: int
    data: int
    method: str


@cache
def divisors(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def tensor_degree_divides(work: Workload, degree: int) -> bool:
    """Whether tensor of this degree cuts the model evenly. A vocabulary may be filled up, unless it is our decoder."""
    model = work.model
    whole = [model.heads, model.kv_heads, model.ffn, work.sequence]
    whole += [model.expert_ffn] * (model.experts > 0) + [model.vocab] * (work.base_config is not None)
    return all(number % degree == 0 for number in whole)


def model_parallel_degrees(
    work: Workload, ranks: int, per_node: int, space: SearchSpace
) -> Iterator[ModelParallelDegrees]:
    """In every one tensor groups are neighbours inside a node where they can be: that is the order of the axes."""
    model, pinned, axes = work.model, work.pinned, space.axes
    for tensor in permitted_degrees(divisors(ranks), "tensor" in axes, pinned.get("layout.tensor")):
        most = space.tensor or per_node
        if (tensor > most and "layout.tensor" not in pinned) or not tensor_degree_divides(work, tensor):
            continue
        for pipeline in permitted_degrees(divisors(ranks // tensor), "pipeline" in axes, pinned.get("layout.pipeline")):
            if pipeline > model.layers:
                continue
            rest = ranks // tensor // pipeline
            for context in permitted_degrees(divisors(rest), "context" in axes, pinned.get("layout.context")):
                data = rest // context
                if work.global_batch % data or (
                    context > 1 and work.sequence // context < MIN_SEQUENCE_CHUNK and not pinned
                ):
                    continue
                for method in context_methods(work, context, tensor):
                    for expert in expert_degrees(work, data * context, "expert" in axes):
                        yield ModelParallelDegrees(pipeline, context, tensor, expert, data, method)


def permitted_degrees(values: list[int], free: bool, pin: int | str | None) -> list[int]:
    if pin is not None:
        return [int(pin)] if int(pin) in values else []
    return values if free else values[:1]


def context_methods(work: Workload, context: int, tensor: int) -> Iterator[str]:
    """Of those ways to attend over a divided sequence that divide it evenly; one rank has nothing to choose."""
    if context == 1:
        yield "ring"
        return
    pin = work.pinned.get("context.method")
    if work.sequence % (context * lcm(2, tensor)) == 0 and pin in (None, "ring"):
        yield "ring"
    whole = work.sequence % (context * tensor) == 0 and work.model.heads % (context * tensor) == 0
    if whole and pin in (None, "all-to-all"):
        yield "all-to-all"


def expert_degrees(work: Workload, fold: int, free: bool) -> list[int]:
    if not work.model.experts:
        return [1] if work.pinned.get("layout.expert", 1) == 1 else []
    fits = [degree for degree in divisors(work.model.experts) if fold % degree == 0]
    return permitted_degrees(fits, free, work.pinned.get("layout.expert"))


def sharded_layouts(
    work: Workload, frame: ModelParallelDegrees, space: SearchSpace
) -> Iterator[tuple[str, list[Layout]]]:
    """(kind of sharding, layouts from the smallest group that shards are divided over to the largest)."""
    pinned, data = work.pinned, frame.data
    whole = Layout(frame.pipeline, data, 1, frame.context, frame.tensor, frame.expert)
    kind = pinned.get("layout.shard")
    copies, degree = pinned.get("layout.replicate"), pinned.get("layout.shard_degree")
    if kind in (None, "none") and degree in (None, 1) and copies in (None, data):
        yield "none", [whole]
    for sharded in SHARDINGS if "shard" in space.axes or kind else ():
        if kind not in (None, sharded) or (sharded == "gradients" and frame.pipeline > 1):
            continue
        found = [
            replace(whole, replicate=data // shards, shard=shards)
            for shards in divisors(data)[1:]
            if degree in (None, shards)
            and (copies is None or copies == (data if degree is None and shards == data else data // shards))
        ]
        if fitting := [layout for layout in found if layout.expert_axes_size % layout.expert == 0]:
            yield sharded, fitting


def micro_batch_sizes(work: Workload, frame: ModelParallelDegrees) -> list[int]:
    """Sizes of a pass, smallest first, each at least half as large again as the one before."""
    local = work.global_batch // frame.data
    if (pin := work.pinned.get("batch.micro")) is not None:
        return [int(pin)] if local % int(pin) == 0 else []
    tokens = work.sequence // frame.context
    found = [1]
    for micro in divisors(local):
        if micro * tokens <= MAX_MICRO_BATCH_TOKENS and micro >= 1.5 * found[-1]:
            found.append(micro)
    return found


def pipeline_schedules(work: Workload, frame: ModelParallelDegrees) -> list[tuple[str, int]]:
    """(kind, stages a rank); gpipe holds more than 1f1b and waits as long, so it is for steps that cannot fill that."""
    if frame.pipeline == 1:
        return [("1f1b", 1)]
    kind, pin = work.pinned.get("pipeline.schedule"), work.pinned.get("pipeline.stages")
    found = [(name, each) for name, schedule in SCHEDULES.items() for each in schedule.candidate_stages]
    most = work.model.layers // frame.pipeline
    return [(name, each) for name, each in found if each <= most and kind in (None, name) and pin in (None, each)]


def fills_schedule(kind: str, pipeline: int, micros: int) -> bool:
    """Whether a step has micro-batches enough for a schedule to be what it is for, and evenly many where it asks for
    that. With fewer, ranks wait as long as by gpipe, which is left for such steps.
    """
    schedule = find_schedule(kind)
    if micros < schedule.fill_micro_batches(pipeline):
        return False
    return not schedule.even_rounds or micros % max(1, micros // pipeline) == 0
