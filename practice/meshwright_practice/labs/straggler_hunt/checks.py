"""The checks of the lab on stragglers."""

from __future__ import annotations

import random
from typing import Any

from meshwright_practice.labs.work import Work

RANKS, STEPS = 4, 30
NORMAL = {"fetch": 0.004, "copy": 0.001, "forward": 0.050, "backward": 0.100, "update": 0.010}
Records = list[dict[str, Any]]


def run_records(
    delays: dict[tuple[int, str], Any],
    seed: int,
    inside: dict[int, str] | None = None,
    first_step: float = 1.0,
    ranks: int = RANKS,
) -> Records:
    """The records of a synchronous run.

    Args:
        delays: (rank, phase) -> a function of the step that returns additional seconds.
        seed: of the noise, which is 5 % of every phase.
        inside: rank -> the phase in which it waits for others inside a collective; the other ranks wait in `sync`.
        first_step: by what the first step is slower on rank 0.
        ranks: their number.
    """
    noise = random.Random(seed)
    records = []
    for step in range(STEPS):
        local = []
        for rank in range(ranks):
            factor = first_step if step == 0 and rank == 0 else 1.0
            phases = {phase: seconds * factor * noise.uniform(0.95, 1.05) for phase, seconds in NORMAL.items()}
            for (slow, phase), extra in delays.items():
                if slow == rank:
                    phases[phase] += extra(step)
            local.append(phases)
        slowest = max(sum(phases.values()) for phases in local)
        for rank, phases in enumerate(local):
            behind = slowest - sum(phases.values())
            waited = {inside[rank]: behind} if inside and rank in inside else {}
            sync = 0.003 if waited else 0.003 + behind
            shown = {phase: seconds + waited.get(phase, 0.0) for phase, seconds in phases.items()}
            records.append({"rank": rank, "step": step, "phases": {**shown, "sync": sync}, "waits": waited})
    noise.shuffle(records)
    return records


def always(seconds: float) -> Any:
    return lambda _step: seconds


def starting(first: int, seconds: float) -> Any:
    return lambda step: seconds if step >= first else 0.0


def once(at: int, seconds: float) -> Any:
    return lambda step: seconds if step == at else 0.0


def explain(found: Any, truth: dict[str, Any], inside: str) -> str:
    """Says which usual mistake gives this answer."""
    if not isinstance(found, dict) or not {"rank", "phase", "since"} <= found.keys():
        return 'return a dictionary with rank, phase and since, as {"rank": 2, "phase": "forward", "since": 1}'
    if found["phase"] == "sync":
        return "sync is waiting: the rank with the longest sync is a victim, and the one with the shortest is suspect"
    if found["rank"] != truth["rank"]:
        if inside and found["phase"] == inside:
            return "this rank waits inside a collective: subtract `waits` before you compare"
        return "this rank does no more work than the others: compare local seconds with the median of the ranks"
    if found["phase"] != truth["phase"]:
        return "the phase is the one in which the rank exceeds the others, which need not be its longest one"
    return "the rank and the phase are right; since is the first step in which the rank is behind, after step 0"


def check_case(work: Work, name: str, records: Records, truth: dict[str, Any] | None, inside: str = "") -> None:
    found = work.call(name, work.module.find_straggler, records)
    if truth is None:
        hint = {
            "one stall": "one slow step is not a straggler: use the median over steps, not the mean",
            "first step": "step 0 compiles and allocates: leave it out",
        }.get(name, "noise of a few percent is in every run: an excess below a tenth of the step time does not count")
        work.check(name, found is None, None, found, hint)
    else:
        right = isinstance(found, dict) and all(found.get(key) == value for key, value in truth.items())
        work.check(name, right, truth, found, explain(found, truth, inside))


def grade(work: Work) -> None:
    healthy = run_records({}, 1)
    with work.attempt("functions return"):
        local = work.module.local_seconds(
            {"rank": 0, "step": 1, "phases": {"fetch": 0.25, "forward": 1.0, "sync": 2.0}, "waits": {"forward": 0.75}}
        )
        work.module.find_straggler(healthy)
    work.check(
        "local seconds",
        local == {"fetch": 0.25, "forward": 0.25},
        {"fetch": 0.25, "forward": 0.25},
        local,
        "a rank works for the seconds of its phases without those of `waits`; sync is not work",
    )
    truth = {"rank": 2, "phase": "forward", "since": 1}
    check_case(work, "slow forward", run_records({(2, "forward"): always(0.06)}, 2), truth)
    check_case(
        work, "slow loader", run_records({(1, "fetch"): always(0.05)}, 3), {"rank": 1, "phase": "fetch", "since": 1}
    )
    pair = {(3, "backward"): always(0.06), (3, "fetch"): always(0.04)}  # rank 2 shares a collective with rank 3
    inside = run_records(pair, 4, inside={2: "forward"})
    check_case(work, "waits inside collectives", inside, {"rank": 3, "phase": "backward", "since": 1}, inside="forward")
    later = run_records({(0, "forward"): starting(12, 0.07)}, 5)
    check_case(work, "since", later, {"rank": 0, "phase": "forward", "since": 12})
    check_case(work, "first step", run_records({}, 6, first_step=80.0), None)
    check_case(work, "one stall", run_records({(1, "forward"): once(STEPS - 4, 30.0)}, 7), None)
    check_case(work, "healthy run", healthy, None)
    last = run_records({(7, "update"): always(0.06)}, 8, ranks=8)
    check_case(work, "every rank", last, {"rank": 7, "phase": "update", "since": 1})
