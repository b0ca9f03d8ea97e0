"""Reads the metrics of rollouts, their objective and their account from a snapshot of a run. Torch-free.

A run that trains on samples has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.base.history.rollout_counts import Amount
from meshwright.insight.metrics.metric import Reading, Snapshot


def newest(column: str) -> Callable[[Snapshot], Iterator[Reading]]:
    """Reads the value of the newest step in a column of the rollouts."""

    def read(snapshot: Snapshot) -> Iterator[Reading]:
        table = snapshot.history.rollouts.table
        if len(table):
            yield (), float(table.column(column)[-1])

    return read


def max_staleness(snapshot: Snapshot) -> Iterator[Reading]:
    found = snapshot.history.rollouts.max_staleness
    yield (), float(found) if found is not None else None


def fates(snapshot: Snapshot) -> Iterator[tuple[str, Amount]]:
    """What became of every rollout so far: the amounts add up to all that were generated."""
    counts = snapshot.history.rollouts.counts
    if counts is not None:
        yield from {"trained": counts.trained, "in_flight": counts.in_flight, **counts.dropped}.items()


def rollouts(snapshot: Snapshot) -> Iterator[Reading]:
    for fate, amount in fates(snapshot):
        yield (fate,), float(amount.rollouts)


def tokens(snapshot: Snapshot) -> Iterator[Reading]:
    for fate, amount in fates(snapshot):
        yield (fate,), float(amount.tokens)


def generated(snapshot: Snapshot) -> Iterator[Reading]:
    counts = snapshot.history.rollouts.counts
    yield (), float(counts.generated.rollouts) if counts is not None else None


def generator_idle(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.history.rollouts.table.recent().generator_idle_share


def learner_idle(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.history.rollouts.table.recent().learner_idle_share


def problems(snapshot: Snapshot) -> Iterator[Reading]:
    if snapshot.history.rollouts:
        yield (), float(snapshot.history.rollouts.problems.total)
