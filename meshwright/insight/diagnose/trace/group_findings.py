"""Causes that only the traces of several ranks show together: stragglers, pipeline bubbles, uneven experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.insight.diagnose.finding import LIMITING_SHARE, Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.event_table import Floats
from meshwright.insight.diagnose.trace.rank_findings import CHECK, confidence, settings_for
from meshwright.insight.diagnose.trace.rank_summary import RankSummary

LAST_SHARE = 0.6
"""Share of the waiting that one rank must cause to be the straggler."""
STEADY_SHARE = 0.6
"""Share of the steps in which the others wait for a straggler above which it is always slower."""
IMBALANCE = 1.15
"""Largest to mean compute of the stages above which a pipeline is uneven."""
UNEVEN_EXPERTS = 1.25
"""Largest to mean all-to-all message above which experts are uneven."""


@dataclass(frozen=True)
class MatchedCollective:
    """One collective on all ranks of its group. Microseconds, in the order of `ranks`."""

    kind: str
    ranks: tuple[int, ...]
    start: Floats
    duration: Floats
    message_bytes: Floats

    @property
    def last(self) -> int:
        """The rank that arrives last. All ranks leave a collective together, so that its call is the shortest."""
        return self.ranks[int(self.duration.argmin())]


def match_collectives(ranks: list[RankSummary]) -> list[MatchedCollective]:
    """Matches the collectives of ranks by process group and sequence number, or by their order within kind and group.

    Send and receive have partners of their own and are not matched.
    """
    found: dict[tuple[str, str, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for index, summary in enumerate(ranks):
        counts: dict[tuple[str, str], int] = defaultdict(int)
        calls = summary.calls
        for row, (kind, group, sequence) in enumerate(zip(calls.kind, calls.group, calls.sequence, strict=True)):
            if kind == "send/recv":
                continue
            order = counts[kind, group]
            counts[kind, group] += 1
            found[kind, group, sequence if sequence >= 0 else order, sequence >= 0].append((index, row))
    matched = []
    for (kind, *_), members in found.items():
        if len({index for index, _ in members}) < 2 or len({index for index, _ in members}) != len(members):
            continue
        matched.append(
            MatchedCollective(
                kind,
                tuple(ranks[index].rank for index, _ in members),
                *(
                    np.array([getattr(ranks[index].calls, column)[row] for index, row in members])
                    for column in ("start", "duration", "message_bytes")
                ),
            )
        )
    return matched


def find_between_ranks(ranks: list[RankSummary], matched: list[MatchedCollective]) -> Iterator[Finding]:
    """Compares the traces of several ranks; also finds pipeline bubbles in the trace of one rank."""
    yield from find_bubble(ranks)
    uneven = list(find_experts(ranks, matched))
    yield from uneven
    yield from find_straggler(ranks, [call for call in matched if not (uneven and call.kind == "all-to-all")])


def waiting(ranks: list[RankSummary], calls: list[MatchedCollective]) -> dict[int, Intervals]:
    """When each rank is in a collective, waits for the last rank to arrive, and does not compute."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        for rank, start, wait in zip(call.ranks, call.start, call.duration - call.duration.min(), strict=True):
            found[rank].append((start, start + wait))
    times = {rank: np.array(pairs).reshape(-1, 2) for rank, pairs in found.items()}
    return {
        summary.rank: Intervals.union(*times[summary.rank].T) - summary.compute
        for summary in ranks
        if summary.rank in times
    }


def find_straggler(ranks: list[RankSummary], matched: list[MatchedCollective]) -> Iterator[Finding]:
    """The rank that arrives last at collectives while the others wait."""
    by_last: dict[int, list[MatchedCollective]] = defaultdict(list)
    for call in matched:
        by_last[call.last].append(call)
    waits = {last: waiting(ranks, calls) for last, calls in by_last.items()}
    caused = {
        last: float(np.median([wait.total for rank, wait in by_rank.items() if rank != last])) / 1e6
        for last, by_rank in waits.items()
    }
    if not caused:
        return
    rank = max(caused, key=lambda rank: caused[rank])
    others = [summary for summary in ranks if summary.rank in waits[rank] and summary.rank != rank]
    seconds = float(np.median([summary.breakdown.seconds for summary in others]))
    share = caused[rank] / seconds if seconds else 0.0
    if share < LIMITING_SHARE or caused[rank] < LAST_SHARE * sum(caused.values()):
        return
    often = np.mean([is_slow_step(rank, window, waits, others[0]) for window in others[0].first_windows] or [True])
    slow = next(summary for summary in ranks if summary.rank == rank)
    phase, own, typical = slow_part(slow, others)
    variant = "steady" if often >= STEADY_SHARE else "now and then"
    named = {"fetch": "loading data", "compute": "computing", "host": "outside kernels and operators"}[phase]
    yield Finding(
        "straggler",
        variant,
        f"Rank {rank} arrives last at the collectives ({variant}); the others wait {share:.0%} of the time for it, "
        f"while it is {named}.",
        share,
        confidence(share),
        rank=rank,
        phase=phase,
        evidence=(
            MeasuredFigure(
                "waiting caused by the rank, per step",
                caused[rank] / slow.step_count,
                "s",
                seconds / slow.step_count,
                "step time",
            ),
            MeasuredFigure(f"its time {named}, per step", own, "s", typical, "other ranks"),
            MeasuredFigure("steps in which the others wait for it", float(often), "share"),
        ),
        change=Change(action=STRAGGLER_ACTIONS[phase]),
        check=CHECK,
    )


def is_slow_step(
    rank: int, window: tuple[float, float], waits: dict[int, dict[int, Intervals]], other: RankSummary
) -> bool:
    """Whether another rank waits longer for `rank` in a step than for any other, and more than LIMITING_SHARE of it."""
    times = {last: by_rank[other.rank].clip(*window).total for last, by_rank in waits.items() if other.rank in by_rank}
    return times.get(rank, 0.0) == max(times.values()) and times.get(rank, 0.0) > LIMITING_SHARE * (
        window[1] - window[0]
    )


STRAGGLER_ACTIONS = {
    "fetch": "check the storage and the loader of this rank; more DataLoader workers hide a slow source",
    "compute": "give every rank the same number of tokens, and check the clocks and temperature of this device",
    "host": "check the CPU of this rank: other processes, garbage collection, logging, or its NUMA binding",
}


def slow_part(slow: RankSummary, others: list[RankSummary]) -> tuple[str, float, float]:
    """The part of its time in which a rank differs most from the others: its name and both seconds per step."""

    def parts(summary: RankSummary) -> dict[str, float]:
        breakdown, steps = summary.breakdown, summary.step_count
        loader = breakdown.idle_causes.get("loader", 0.0)
        return {
            "fetch": loader / steps,
            "compute": breakdown.compute / steps,
            "host": (breakdown.idle - loader - breakdown.idle_causes.get("collective issue", 0.0)) / steps,
        }

    own = parts(slow)
    typical = {name: float(np.median([parts(summary)[name] for summary in others])) for name in own}
    name = max(own, key=lambda name: own[name] - typical[name])
    return name, own[name], typical[name]


def find_bubble(ranks: list[RankSummary]) -> Iterator[Finding]:
    """Stages wait in send and receive: for the fill and drain of the schedule, or for a stage that computes longer."""
    waits = {
        summary.rank: summary.breakdown.share(
            float(summary.calls.exposed[summary.calls.of_kind("send/recv")].sum()) / 1e6
        )
        for summary in ranks
    }
    share = float(np.mean(list(waits.values())))
    if share < LIMITING_SHARE:
        return
    compute = {summary.rank: summary.breakdown.compute / summary.step_count for summary in ranks}
    mean = float(np.mean(list(compute.values())))
    longest = max(compute, key=lambda rank: compute[rank])
    is_uneven = len(ranks) > 1 and compute[longest] > IMBALANCE * mean
    yield Finding(
        "bubble",
        "imbalance" if is_uneven else "fill and drain",
        f"Pipeline stages wait {share:.0%} of the time in send and receive"
        + (
            f": the stage of rank {longest} computes {compute[longest] / mean:.2f} times as long as the mean."
            if is_uneven
            else ", while the schedule fills and drains."
        ),
        share,
        "high" if len(ranks) > 1 and share >= 0.1 else "medium",
        rank=longest if is_uneven else None,
        axis="pipeline",
        evidence=(
            *(
                MeasuredFigure(f"waiting in send and receive, rank {rank}", wait, "share")
                for rank, wait in list(waits.items())[:8]
            ),
            MeasuredFigure("longest compute of a stage per step", compute[longest], "s", mean, "mean of the stages"),
        ),
        change=Change(
            action=f"move layers from the stage of rank {longest} to the others"
            if is_uneven
            else "more micro-batches per step (a smaller batch.micro), or an interleaved or zero-bubble schedule",
        ),
        check=CHECK,
    )


def find_experts(ranks: list[RankSummary], matched: list[MatchedCollective]) -> Iterator[Finding]:
    """Ranks exchange all-to-all messages of different sizes, and those with fewer tokens wait."""
    calls = [call for call in matched if call.kind == "all-to-all"]
    sized = [call for call in calls if call.message_bytes.sum() > 0]
    ratios = [float(call.message_bytes.max() / call.message_bytes.mean()) for call in sized]
    ratios += [float(ratio) for summary in ranks for ratio in summary.calls.largest_split if ratio > 0]
    if not ratios or np.median(ratios) < UNEVEN_EXPERTS:
        return
    seconds = max(summary.breakdown.seconds for summary in ranks)
    if calls:
        waited = float(np.mean([wait.total for wait in waiting(ranks, calls).values()])) / 1e6
    else:  # of one rank, all exposed time of its all-to-alls
        waited = float(np.mean([s.calls.exposed[s.calls.of_kind("all-to-all")].sum() for s in ranks])) / 1e6
    share = waited / seconds if seconds else 0.0
    if share < LIMITING_SHARE:
        return
    totals: dict[int, float] = defaultdict(float)
    for call in sized:
        for rank, size in zip(call.ranks, call.message_bytes, strict=True):
            totals[rank] += float(size)
    yield Finding(
        "experts",
        "uneven tokens",
        f"Ranks wait {share:.0%} of the time in all-to-alls with uneven messages: "
        f"the largest is {np.median(ratios):.2f} times the mean.",
        share,
        confidence(share),
        rank=max(totals, key=lambda rank: totals[rank]) if totals else None,
        axis="expert",
        evidence=(MeasuredFigure("largest to mean message of an all-to-all", float(np.median(ratios)), "ratio"),),
        change=Change(
            settings_for(ranks[0].header, "model.router_bias_rate = 0.01"),
            "balance the experts: an auxiliary loss, a routing bias, a capacity factor or another placement",
        ),
        check=CHECK,
    )
