"""Reads the metrics of ranks, communication, memory, experts and the host from a snapshot of a run. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from meshwright.base.history.step_table import WAIT_PHASES
from meshwright.insight.metrics.metric import Reading, Snapshot, mean

MAX_BLOCKS = 128
"""Blocks with experts that have series of their own."""
NANOSECONDS = 1e9


def phase_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    for rank, reading in snapshot.history.heartbeats.items():
        for phase, seconds in reading.phase_seconds.items():
            yield (rank, phase), seconds


def wait_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    for rank in snapshot.ranks:
        recent = snapshot.recent(rank)
        for phase in ("sync", *WAIT_PHASES):
            column = f"phases.{phase}" if phase == "sync" else f"waits.{phase}"
            yield (rank, phase), mean(recent.column(column))


def rank_step_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    yield from snapshot.mean_of_ranks("seconds")


def loader_wait(snapshot: Snapshot) -> Iterator[Reading]:
    yield from snapshot.mean_of_ranks("phases.fetch")


def heartbeat_age(snapshot: Snapshot) -> Iterator[Reading]:
    """Counts from the last beat that was seen, or on the same host from the moment at which the phase began."""
    history = snapshot.history
    liveness = history.liveness
    for rank, reading in history.heartbeats.items() if history.is_alive else ():
        signs = [liveness.advanced[rank]] if rank in liveness.advanced else []
        if liveness.on_this_host:
            signs.append(reading.phase_entered / NANOSECONDS)
        if signs and reading.phase != "end":
            yield (rank,), max(0.0, snapshot.clock - max(signs))


def heartbeat_step(snapshot: Snapshot) -> Iterator[Reading]:
    for rank, reading in snapshot.history.heartbeats.items():
        yield (rank,), float(reading.step)


def is_waiting(snapshot: Snapshot) -> Iterator[Reading]:
    for rank, reading in snapshot.history.heartbeats.items():
        yield (rank,), float(reading.waiting)


def stragglers(snapshot: Snapshot) -> Iterator[Reading]:
    counts = Counter(event["rank"] for event in snapshot.history.stragglers)
    for rank in snapshot.ranks:
        yield (rank,), float(counts[rank])


def exposed_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    yield from snapshot.mean_of_ranks("exposed")


def exposed_ratio(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.communication.share


def bucket_bytes(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("message_bytes")


def buckets(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("buckets")


def message_bytes(snapshot: Snapshot) -> Iterator[Reading]:
    yield from collective_bytes(snapshot, lambda message, _wire: message)


def wire_bytes(snapshot: Snapshot) -> Iterator[Reading]:
    yield from collective_bytes(snapshot, lambda _message, wire: wire)


def collective_bytes(snapshot: Snapshot, choose: Callable[[int, int], int]) -> Iterator[Reading]:
    """The bytes of every axis and collective; a collective on process groups of several sizes has several rows."""
    for rank, counters in snapshot.history.counters.items():
        sums: Counter[tuple[str, str]] = Counter()
        for axis, collective, message, wire in counters.communication:
            sums[axis, collective] += choose(message, wire)
        for (axis, collective), total in sums.items():
            yield (rank, axis, collective), float(total)


def peak_memory(snapshot: Snapshot) -> Iterator[Reading]:
    for rank in snapshot.ranks:
        steps = snapshot.history.steps(rank)
        yield (rank,), float(steps.memory[-1]) if len(steps) else None


def memory_at_peak(snapshot: Snapshot) -> Iterator[Reading]:
    for rank, counters in snapshot.history.counters.items():
        for name, size in counters.at_peak.items():
            yield (rank, name), float(size)


def micro_batches_in_flight(snapshot: Snapshot) -> Iterator[Reading]:
    yield from snapshot.mean_of_ranks("live")


def pipeline_idle(snapshot: Snapshot) -> Iterator[Reading]:
    yield from snapshot.mean_of_ranks("idle")


def expert_load(snapshot: Snapshot) -> Iterator[Reading]:
    record = snapshot.history.expert_loads
    for block, loads in enumerate(record["loads"][:MAX_BLOCKS] if record else ()):
        total = sum(loads)
        yield (block,), max(loads) * len(loads) / total if total > 0 else None


def dropped_tokens(snapshot: Snapshot) -> Iterator[Reading]:
    record = snapshot.history.expert_loads
    for block, dropped in enumerate(record["dropped"][:MAX_BLOCKS] if record else ()):
        yield (block,), dropped


def network_received(snapshot: Snapshot) -> Iterator[Reading]:
    for interface, (received, _) in snapshot.network.items():
        yield (interface,), float(received)


def network_transmitted(snapshot: Snapshot) -> Iterator[Reading]:
    for interface, (_, transmitted) in snapshot.network.items():
        yield (interface,), float(transmitted)
