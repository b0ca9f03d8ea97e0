"""Checks that the bytes that a real run counted, communicated and resident, equal the planner's formulas exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.untrusted_records import RecordedCounters
from meshwright.base.topology.layout import Layout
from meshwright.core.trainer.job import Job
from meshwright.planner.cost.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.cost.compare_volumes import compare_volumes
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.planner.cost.trace.activation_messages import data_dependent_axes
from meshwright.prover.claims import Claim, describe_settings

EXACT_MEMORY = ("fp32", "fp64")
"""Precisions for which the peaks are exact: autocast makes short-lived copies of gradients in lower precision."""
MEMORY_CLASSES = ("parameter", "gradient", "optimizer")


def check_communication(job: Job, changes: tuple[str, ...]) -> Iterator[Claim]:
    """Compares the counters that the ranks of a finished run wrote with the formulas."""
    config, layout, batch = job.config, job.layout, job.batch
    counters = read_counters(job)
    where = f"{layout}{describe_settings(config)}"
    claim = f"{where}: communication volume of a real step equals the formulas exactly"
    if len(counters) < layout.ranks:
        missing = sorted(set(range(layout.ranks)) - counters.keys())
        yield Claim(claim, False, f"ranks {missing} counted no step", changes)
        return
    predicted = [comm_volume(config, layout, batch, rank) for rank in range(layout.ranks)]
    counted = [[CollectiveVolume(*row) for row in counters[rank].communication] for rank in range(layout.ranks)]
    excluded = data_dependent_axes(config, layout)
    differences = list(all_differences(layout, predicted, counted, excluded))
    total = sum(row.wire_bytes for row in predicted[0])
    rows = ", ".join(f"{row.axis} {row.collective} {row.message_bytes:,}" for row in predicted[0])
    measured = f"rank 0: {rows or 'no collective'}; {total:,} wire bytes per step{describe_excluded(excluded)}"
    left_open = () if config.precision.compute in EXACT_MEMORY else (f"peak memory in {config.precision.compute}",)
    yield Claim(claim, not differences, "; ".join(differences) or measured, changes, left_open)
    if config.precision.compute not in EXACT_MEMORY:
        return
    wrong = [
        f"rank {rank}: peak {name} memory is {counters[rank].peak.get(name, 0):,} bytes, the formula gives "
        f"{getattr(expected, name):,}"
        for rank in range(layout.ranks)
        for expected in [state_memory(config, layout, batch, rank)]
        for name in MEMORY_CLASSES
        if counters[rank].peak.get(name, 0) != getattr(expected, name)
    ]
    peaks = ", ".join(f"{name} {counters[0].peak.get(name, 0):,}" for name in MEMORY_CLASSES)
    claim = f"{where}: peak memory of parameters, gradients and optimizer state equals the formulas exactly"
    yield Claim(claim, not wrong, "; ".join(wrong) or f"rank 0: {peaks} bytes", changes)


def read_counters(job: Job) -> dict[int, RecordedCounters]:
    """The newest counters of every rank."""
    return RunHistory(job.folder).counters


def describe_excluded(excluded: dict[str, str]) -> str:
    return "".join(f"; {axis} is not compared: {reason}" for axis, reason in excluded.items())


def all_differences(
    layout: Layout,
    predicted: list[list[CollectiveVolume]],
    counted: list[list[CollectiveVolume]],
    excluded: Collection[str] = (),
) -> Iterator[str]:
    """One sentence per collective whose counted bytes differ from the predicted ones (see `compare_volumes`)."""
    pairs = compare_volumes(layout, dict(enumerate(predicted)), dict(enumerate(counted)), excluded)
    return (str(pair) for pair in pairs if not pair.equal)
