"""Diagnoses the profiler traces of any program: one rank or many, with or without a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import (
    CONFIDENCE_WEIGHTS,
    LIMITING_SHARE,
    UNJUDGED_SHARE,
    Change,
    Finding,
    MeasuredFigure,
)
from meshwright.insight.diagnose.trace.breakdown import Breakdown, make_timeline
from meshwright.insight.diagnose.trace.communication_findings import find_communication
from meshwright.insight.diagnose.trace.group_findings import find_between_ranks, match_collectives, waiting
from meshwright.insight.diagnose.trace.kineto.kineto_trace import EXPECTED, KinetoTrace, read_trace
from meshwright.insight.diagnose.trace.rank_findings import CHECK, find_data, find_device, find_memory
from meshwright.insight.diagnose.trace.rank_summary import RankSummary, summarize

EXPLAINED_BY = {
    "exposed communication": ("communication", "bubble", "straggler", "experts"),
    "loader": ("data",),
    "allocation": ("memory",),
    "collective issue": ("communication",),
    "synchronization": (("device", "synchronization"),),
    "launch": (("device", "small kernels"), ("device", "host-bound launch")),
    "outside operators": (("device", "host outside operators"),),
}
"""Exposed communication, or why a device is idle -> the causes, or kinds of a cause, that explain it."""


@dataclass(frozen=True)
class RankDiagnosis:
    """The breakdown of one rank."""

    rank: int
    path: Path
    device: str
    """name of the device, or "host" if the trace has no device"""
    breakdown: Breakdown
    steps: dict[int, Breakdown]
    """step -> its breakdown"""
    notes: tuple[str, ...] = ()
    """what is missing from the trace"""
    is_judged: bool = True
    """False of a program that uses a device, if the trace has no device events: its breakdown is that of the host"""

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "trace": str(self.path),
            "device": self.device,
            "breakdown": self.breakdown.to_json(),
            "steps": {str(step): breakdown.to_json() for step, breakdown in self.steps.items()},
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class TraceDiagnosis:
    """The findings in all traces, best first, and the breakdown of each rank."""

    findings: list[Finding]
    ranks: list[RankDiagnosis] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def diagnose_traces(paths: Sequence[Path]) -> TraceDiagnosis:
    """Names what limits a program, from one trace per rank. The events of a trace are released before the next one."""
    ranks: list[RankDiagnosis] = []
    summaries: list[RankSummary] = []
    findings: list[Finding] = []
    for number, path in enumerate(paths):
        trace = read_trace(path)
        rank = number if trace.rank is None else trace.rank
        same = next((other.path for other in ranks if other.rank == rank), None)
        if same is not None:
            raise ConfigError(
                f"the traces {same} and {path} are both of rank {rank}",
                "expected one trace per rank, of the same steps",
            )
        diagnosis, summary, found = diagnose_rank(trace, rank)
        ranks.append(diagnosis)
        summaries.append(summary)
        findings += found
    matched = match_collectives(summaries)
    waits = waiting(summaries, matched)
    for summary in summaries:
        waited = waits[summary.rank].total / 1e6 if summary.rank in waits else 0.0
        findings += find_communication(summary, waited)
    found = [*merge_ranks(findings, len(paths)), *find_between_ranks(summaries, matched)]
    ranks.sort(key=lambda rank: rank.rank)
    if any(not rank.is_judged for rank in ranks):
        found = []  # durations of the host say nothing about a device, and nothing about the other ranks
    found.sort(key=weight, reverse=True)
    found += find_unjudged(ranks, found)
    return TraceDiagnosis(found or [healthy(ranks)], ranks)


def weight(finding: Finding) -> float:
    return finding.share * CONFIDENCE_WEIGHTS[finding.confidence]


def diagnose_rank(trace: KinetoTrace, rank: int) -> tuple[RankDiagnosis, RankSummary, list[Finding]]:
    """Diagnoses the trace of one rank."""
    timeline = make_timeline(trace)
    if not len(timeline.busy):
        raise ConfigError(f"trace {trace.path} has no kernels, operators or collectives", EXPECTED)
    summary = summarize(timeline, rank)
    findings = [
        *find_data(timeline, summary.breakdown),
        *find_device(timeline, summary.breakdown),
        *find_memory(timeline, summary.breakdown),
    ]
    diagnosis = RankDiagnosis(
        rank,
        trace.path,
        device_name(trace),
        summary.breakdown,
        summary.steps,
        tuple(trace.notes),
        trace.has_device or not trace.uses_device,
    )
    return diagnosis, summary, [replace(finding, rank=rank) for finding in findings]


def device_name(trace: KinetoTrace) -> str:
    """The name of the device that the trace is of."""
    if not trace.has_device:
        return "host"
    devices = trace.header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else {}
    name = first.get("name") if isinstance(first, dict) else None
    return name[:64] if isinstance(name, str) else "device"


def merge_ranks(findings: list[Finding], ranks: int) -> list[Finding]:
    """Keeps one finding per cause and variant, and one of communication: that of the rank with the largest share."""
    best: dict[tuple[str, str], Finding] = {}
    counts: dict[tuple[str, str], int] = {}
    for finding in findings:
        key = finding.cause, "" if finding.cause == "communication" else finding.variant
        counts[key] = counts.get(key, 0) + 1
        if key not in best or weight(finding) > weight(best[key]):
            best[key] = finding
    everywhere = f"All {ranks} ranks are affected."
    return [
        finding if counts[key] < ranks or ranks == 1 else replace(finding, sentence=f"{finding.sentence} {everywhere}")
        for key, finding in best.items()
    ]


def find_unjudged(ranks: list[RankDiagnosis], found: list[Finding]) -> Iterator[Finding]:
    """The rank with the most time that no finding explains, if that is too much for a verdict."""
    blind = [rank for rank in ranks if not rank.is_judged or (rank.device == "host" and not found)]
    if blind:
        ranks_text = ", ".join(str(rank.rank) for rank in blind[:8])
        yield Finding(
            "not judged",
            "no device events",
            f"not judged: the trace has no device events (rank {ranks_text}).",
            0.0,
            "low",
            rank=blind[0].rank,
            evidence=(MeasuredFigure("ranks without device events", len(blind), "count", len(ranks), "all ranks"),),
            change=Change(
                action="record the device as well: profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]), "
                "which is the name on ROCm too; a program on CPU has none, and its longest operators are in the trace"
            ),
            check=CHECK,
        )
        return
    unexplained = {rank.rank: unexplained_parts(rank.breakdown, found) for rank in ranks}
    rank = max(ranks, key=lambda one: one.breakdown.share(sum(unexplained[one.rank].values())))
    parts, breakdown = unexplained[rank.rank], rank.breakdown
    share = breakdown.share(sum(parts.values()))
    if share <= UNJUDGED_SHARE:
        return
    names = ", ".join(f"{name} {breakdown.share(seconds):.0%}" for name, seconds in parts.items() if seconds > 0)
    yield Finding(
        "not judged",
        "time without a cause",
        f"not judged: rank {rank.rank} spends {share:.0%} of the time on what no finding explains ({names}).",
        share,
        "low",
        rank=rank.rank,
        evidence=tuple(
            MeasuredFigure(name, seconds, "s", breakdown.seconds, "time of the trace")
            for name, seconds in parts.items()
            if seconds > 0
        ),
        change=Change(action="look at these times in the trace itself, for example in Perfetto"),
        check=CHECK,
    )


def unexplained_parts(breakdown: Breakdown, found: list[Finding]) -> dict[str, float]:
    """The seconds of a rank that are not compute and belong to no finding: part -> seconds, the largest first. Copies,
    and activities that wait for others, belong to none; the rest does if there is a finding of its own cause.
    """
    known = {one.cause for one in found} | {(one.cause, one.variant) for one in found}
    idle = {cause: s for cause, s in breakdown.idle_causes.items() if known.isdisjoint(EXPLAINED_BY.get(cause, ()))}
    parts = {f"idle, {cause}": idle.pop(cause, 0.0) for cause in ("dependency", "unknown launch")}
    exposed = breakdown.exposed if known.isdisjoint(EXPLAINED_BY["exposed communication"]) else 0.0
    parts |= {"copies": breakdown.memory, "exposed communication": exposed, "other idle": sum(idle.values())}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def healthy(ranks: list[RankDiagnosis]) -> Finding:
    compute = float(np.mean([rank.breakdown.share(rank.breakdown.compute) for rank in ranks]))
    return Finding(
        "healthy",
        "",
        f"The ranks compute for {compute:.0%} of the time, and no cause takes more than {LIMITING_SHARE:.0%} of it.",
        0.0,
        "high",
        check=CHECK,
    )
