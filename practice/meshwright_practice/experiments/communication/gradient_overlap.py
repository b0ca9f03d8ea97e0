"""The order of gradients and bucket all-reduces in the backward pass of a DDP step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.core.parallel.world import World
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import ELEMENT_BYTES, RankTraining, small_config
from meshwright_practice.pictures import GanttChart, Span

MIB = 1 << 20
BUCKET = "gradient bucket"


@dataclass(frozen=True)
class BackwardEvents:
    """What one rank saw during the last backward pass of a step, in order."""

    names: list[str]
    """gradients by the name of their parameter, and bucket all-reduces by the name of the collective"""
    calls: int
    message_bytes: int
    """what the communication counter saw: all-reduces of the gradients"""

    @property
    def gradients(self) -> list[int]:
        return [index for index, name in enumerate(self.names) if not name.startswith(BUCKET)]

    @property
    def buckets(self) -> list[int]:
        return [index for index, name in enumerate(self.names) if name.startswith(BUCKET)]


class RecordingHeartbeat(Heartbeat):
    """A heartbeat that appends the buckets whose all-reduce begins to a list of events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def collective(self, name: str) -> None:
        super().collective(name)
        if name.startswith(BUCKET):
            self.events.append(name)


def record_backward(world: World, configs: list[RunConfig]) -> list[BackwardEvents]:
    return [record_config(world, config) for config in configs]


def record_config(world: World, config: RunConfig) -> BackwardEvents:
    """Records a step. A parameter's hook runs before the hook by which DDP marks its gradient as ready."""
    events: list[str] = []
    training = RankTraining(replace(world, heartbeat=RecordingHeartbeat(events)), config)
    for name, parameter in training.model.parameters().items():
        parameter.register_post_accumulate_grad_hook(lambda _parameter, name=name: events.append(name))

    def clear(phase: str) -> None:
        if phase == "backward":  # with accumulation, the last micro-batch is recorded
            events.clear()

    counted = training.count()
    training.run(clear)
    return BackwardEvents(list(events), counted.calls("all_reduce"), counted.message("all_reduce"))


def order(knobs: Knobs) -> Observation:
    """The backward pass with a bucket per parameter, with buckets of a share of the model, and with one bucket."""
    ranks = int(knobs["ranks"])
    options = [f"--batch.global={2 * ranks}", f"--batch.micro={2 // int(knobs['accumulation'])}"]
    total = run_spec(small_config(ranks)).parameter_count * ELEMENT_BYTES
    sizes = {"parameter": 1e-6, "bucket": total / int(knobs["buckets"]) / MIB, "model": 2 * total / MIB}
    configs = [small_config(ranks, *options, f"--ddp.bucket_cap_mb={size}") for size in sizes.values()]
    recorded = dict(zip(sizes, run_ranks(record_backward, ranks, configs)[0], strict=True))
    values: dict[str, float] = {"parameters": len(recorded["model"].gradients), "gradient_bytes": total}
    for name, events in recorded.items():
        first = events.buckets[0]
        values[f"all_reduces_{name}"] = len(events.buckets)
        values[f"calls_{name}"] = events.calls
        values[f"message_{name}"] = events.message_bytes / total
        values[f"first_start_{name}"] = sum(index < first for index in events.gradients)
        values[f"gradients_after_start_{name}"] = sum(index > first for index in events.gradients)
        values[f"buckets_before_end_{name}"] = sum(index < events.gradients[-1] for index in events.buckets)
    shown = recorded[str(knobs["picture"])]
    note = (
        f"With buckets, {values['buckets_before_end_bucket']:.0f} of {values['all_reduces_bucket']:.0f} all-reduces "
        "have begun before the last gradient exists."
    )
    return Observation(values, backward_picture(shown), (note,))


def backward_picture(events: BackwardEvents) -> GanttChart:
    """Ticks count events. An all-reduce may take until the end of the backward pass, where DDP waits for it."""
    end = float(len(events.names))
    spans = [Span("backward", events.names[index], index, index + 1) for index in events.gradients]
    spans += [Span("all-reduce", events.names[index], index, end) for index in events.buckets]
    return GanttChart("gradients and bucket all-reduces, in order", "events", tuple(spans))
