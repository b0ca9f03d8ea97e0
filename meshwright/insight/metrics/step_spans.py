"""Makes OpenTelemetry spans of steps and their phases. Torch-free.

A step is one trace: the span of rank 0 is its root, and those of the other ranks are below it. The spans of the phases
are laid end to end in the order of a step, as long as the record says: a phase that is entered several times, with
accumulation for example, is one span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import isfinite, nan

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from meshwright.base.history.step_table import StepTable
from meshwright.base.records.phases import STEP_PHASES
from meshwright.insight.metrics.metric import MAX_RANKS, Snapshot

MAX_STEPS = 256
"""Steps of a rank that one push contains: the newest. Earlier ones are left out, so that a slow collector cannot make
the exporter grow."""
BATCH = 2048
"""Spans of one request."""
NANOSECONDS = 10**9


class StepSpans:
    """The spans of a run's steps that were not taken yet."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource, self._scope = resource, scope
        self._taken: dict[int, float] = {}
        """rank -> the time of the newest record whose spans were taken"""

    def new_batches(self, snapshot: Snapshot) -> Iterator[list[ReadableSpan]]:
        """The spans of the steps that were recorded since the last call, in batches."""
        spans = [span for rank in snapshot.ranks[:MAX_RANKS] for span in self._new_spans(snapshot, rank)]
        for first in range(0, len(spans), BATCH):
            yield spans[first : first + BATCH]

    def _new_spans(self, snapshot: Snapshot, rank: int) -> Iterator[ReadableSpan]:
        steps = snapshot.history.steps(rank)
        steps = steps.select(slice(max(0, len(steps) - MAX_STEPS), None))
        steps = steps.select(steps.time > self._taken.get(rank, 0.0))
        if len(steps):
            self._taken[rank] = float(steps.time[-1])
        for row in range(len(steps)):
            yield from self._step(steps, row, rank, snapshot.run_id or snapshot.run)

    def _step(self, steps: StepTable, row: int, rank: int, run: str) -> Iterator[ReadableSpan]:
        """The span of one step on one rank, and those of its phases."""
        attempt, step = int(steps.attempt[row]), int(steps.step[row])
        trace = digest(16, run, attempt, step)
        context = make_context(trace, "step", rank)
        begin = int(steps.begin[row] * NANOSECONDS)
        attributes = {"meshwright.step": step, "meshwright.attempt": attempt, "meshwright.rank": rank}
        numbers = {name: float(steps.column(name)[row]) for name in ("loss", "grad_norm", "tokens", "exposed")}
        yield ReadableSpan(
            "step",
            context,
            make_context(trace, "step", 0) if rank else None,
            self._resource,
            attributes | {f"meshwright.{name}": value for name, value in numbers.items() if isfinite(value)},
            start_time=begin,
            end_time=begin + int(steps.seconds[row] * NANOSECONDS),
            instrumentation_scope=self._scope,
        )
        for phase in STEP_PHASES:
            seconds = float(steps.column(f"phases.{phase}")[row])
            if seconds > 0:
                waited = nan if phase == "sync" else float(steps.column(f"waits.{phase}")[row])
                end = begin + int(seconds * NANOSECONDS)
                yield ReadableSpan(
                    phase,
                    make_context(trace, phase, rank),
                    context,
                    self._resource,
                    attributes | ({"meshwright.wait_seconds": waited} if isfinite(waited) else {}),
                    start_time=begin,
                    end_time=end,
                    instrumentation_scope=self._scope,
                )
                begin = end


def make_context(trace: int, name: str, rank: int) -> SpanContext:
    """The context of a span. Its ids follow from what it describes: a push that is repeated makes no second span."""
    return SpanContext(trace, digest(8, trace, name, rank), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def digest(size: int, *parts: object) -> int:
    """An id of `size` bytes, which is not zero."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=size).digest(), "big") or 1
