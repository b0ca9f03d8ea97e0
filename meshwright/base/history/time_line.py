"""The time line of rank 0 through all attempts, divided into the parts of the goodput account. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.account import NANOSECONDS, AttemptAccount
from meshwright.base.history.attempts import FAILURES, AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_parts import PART
from meshwright.base.history.step_table import RECENT_STEPS, StepTable

CLOCK_TOLERANCE = 2 * NANOSECONDS
"""A step that begins this long before the previous one has ended shows that the clock was set back. On CUDA the host
queues a step before the previous one has ended on the device."""
MAX_SHIFT = 10**18
"""Nanoseconds by which the times of an attempt are shifted at most; records that need more are not corrected."""
OTHER_SECONDS = 5.0
"""The loop needs less time between two steps, besides evaluation, saves and callbacks."""
OUTSIDE_PARTS = {"evaluate": "evaluation", "save": "checkpoint", "callback": "callback"}

Nanoseconds = NDArray[np.int64]


class TimeLine:
    """Divides the time from the start of a run up to a cursor, which only advances, into parts."""

    def __init__(self, history: RunHistory, now: float) -> None:
        self.history, self.now = history, now
        self.accounts: list[AttemptAccount] = []
        self.notes: list[str] = []
        self.cursor: int | None = None
        self.offset = 0
        """what is added to the clock of the current attempt, so that time does not run backwards"""
        self.after_failure = False

    def at(self, seconds: float) -> int:
        """The place on the time line of a Unix time of the current attempt."""
        return round(seconds * NANOSECONDS) + self.offset

    def fill(self, part: str, until: float) -> None:
        """Gives the time up to a Unix time to a part."""
        self.add(part, self.at(until) - (self.cursor or 0))

    def add(self, part: str, nanoseconds: int) -> None:
        """Gives the next nanoseconds to a part."""
        if nanoseconds > 0 and self.cursor is not None and self.accounts:
            self.accounts[-1].nanoseconds[part] += nanoseconds
            self.cursor += nanoseconds

    def add_attempt(
        self, attempt: AttemptHistory, rows: StepTable, weights: NDArray[np.float64], kept: NDArray[np.bool_]
    ) -> None:
        """Adds the time since the previous attempt, and the attempt itself."""
        running = attempt.outcome == "running"
        started = attempt.started
        if started is None:
            if not running or self.cursor is None:
                return  # nothing is known about it: its time is part of what follows
            started = (self.cursor - self.offset) / NANOSECONDS
        self.begin(attempt, started)
        start_part = "restart" if attempt.restart or self.after_failure else "start"
        ended = attempt.ended if attempt.ended is not None else self.now if running else started
        if len(rows):
            self.add_steps(attempt, rows, weights, kept, start_part)
            self.add_tail(attempt, rows, weights, ended)
        else:
            self.fill(start_part, ended)
        self.after_failure = attempt.outcome in FAILURES

    def begin(self, attempt: AttemptHistory, started: float) -> None:
        """Opens the account of an attempt with the time since the previous one."""
        self.offset = 0
        if self.cursor is None:
            self.cursor = self.at(started)
        if (behind := self.cursor - self.at(started)) > 0:
            self.offset = behind
            if behind > CLOCK_TOLERANCE:
                self.notes.append(
                    f"the clock of attempt {attempt.number} is {behind / NANOSECONDS:.1f} s behind the records of the "
                    "previous attempt: its times are shifted"
                )
        self.accounts.append(AttemptAccount(attempt.number, self.cursor))
        self.fill("restart" if attempt.restart else "idle", started)

    def add_steps(
        self,
        attempt: AttemptHistory,
        rows: StepTable,
        weights: NDArray[np.float64],
        kept: NDArray[np.bool_],
        start_part: str,
    ) -> None:
        """Adds the time from the start of an attempt to the end of its last recorded step."""
        assert self.cursor is not None
        begin, end = self.clamp(attempt, rows)
        before_first = int(begin[0]) - self.cursor
        warmup = int(to_nanoseconds(rows.outside["warmup"])[0])
        compiles = attempt.start.get("compile") is True
        compiling = min(before_first, warmup) if compiles else 0
        self.add("compile", compiling)
        self.add(start_part, before_first - compiling)
        nanoseconds = self.accounts[-1].nanoseconds
        gaps = np.concatenate([[0], begin[1:] - end[:-1]])
        unrecorded = rows.multiplicity > 1
        durations = end - begin + np.where(unrecorded, gaps, 0)
        gaps = np.where(unrecorded, 0, gaps)
        for part, amount in self.divide_gaps(rows, gaps).items():
            nanoseconds[part] += amount
        lost, skipped = ~kept, kept & rows.skipped
        nanoseconds["lost work"] += int(durations[lost].sum())
        nanoseconds["skipped"] += int(durations[skipped].sum())
        productive = kept & ~skipped
        if compiles and productive[0] and len(rows) > 1:
            excess = max(0, int(durations[0] - np.median(durations[1:])))
            nanoseconds["compile"] += excess
            durations[0] -= excess
        for part, amount in spread(durations[productive], weights[productive]).items():
            nanoseconds[part] += amount
        self.cursor = int(end[-1])

    def clamp(self, attempt: AttemptHistory, rows: StepTable) -> tuple[Nanoseconds, Nanoseconds]:
        """When each step begins and ends: after the step before it, and not before the cursor."""
        seconds = np.nan_to_num(rows.seconds)
        ends = np.where(np.isnan(rows.end), rows.time, rows.end)
        ends = np.where(np.isnan(ends), (self.cursor or 0) / NANOSECONDS, ends)
        end = np.round(ends * NANOSECONDS).astype(np.int64) + self.offset
        begin = end - np.round(seconds * NANOSECONDS).astype(np.int64)
        back = np.maximum(0, end[:-1] - begin[1:])
        back = np.where(back > CLOCK_TOLERANCE + (end - begin)[:-1], back, 0)
        if 0 < back.astype(np.float64).sum() < MAX_SHIFT:
            self.notes.append(f"the clock was set back during attempt {attempt.number}: later times are shifted")
            shift = np.concatenate([[0], np.cumsum(back)])
            begin, end = begin + shift, end + shift
            self.offset += int(shift[-1])
        end = np.maximum.accumulate(np.maximum(end, self.cursor or 0))
        previous = np.concatenate([[self.cursor or 0], end[:-1]])
        return np.clip(begin, previous, end), end

    def divide_gaps(self, rows: StepTable, gaps: Nanoseconds) -> dict[str, int]:
        """Divides the gaps before steps by what the training thread did in them."""
        amounts: dict[str, int] = {}
        left = gaps.copy()
        for phase, part in OUTSIDE_PARTS.items():
            taken = np.minimum(left, to_nanoseconds(rows.outside[phase]))
            amounts[part] = int(taken.sum())
            left -= taken
        other = np.minimum(left, round(OTHER_SECONDS * NANOSECONDS))
        return amounts | {"bookkeeping": int(other.sum()), "idle": int((left - other).sum())}

    def add_tail(self, attempt: AttemptHistory, rows: StepTable, weights: NDArray[np.float64], ended: float) -> None:
        """Adds the time from the last recorded step of an attempt to its end, or to now."""
        outcome = attempt.outcome
        if outcome == "running":
            self.add_current_step(rows, weights, ended)
        elif outcome in FAILURES:
            hangs = [hang["time"] for hang in self.history.hangs if hang["attempt"] == attempt.number and hang["time"]]
            if outcome == "hang" and hangs:
                self.fill("stalled", min(hangs[-1], ended))
            self.fill("restart", ended)
        else:
            outside = attempt.end["outside"] if attempt.end is not None else self.saves_after(attempt, rows)
            for phase, part in OUTSIDE_PARTS.items():
                left = self.at(ended) - (self.cursor or 0)
                self.add(part, min(left, round((outside.get(phase) or 0.0) * NANOSECONDS)))
            self.fill("end", ended)

    def saves_after(self, attempt: AttemptHistory, rows: StepTable) -> dict[str, float]:
        """The seconds of saves after the last step of an attempt that a signal has stopped."""
        last = float(rows.end[-1])
        stalls = [
            found.stall_seconds or 0.0
            for found in self.history.checkpoints
            if found.attempt == attempt.number and found.time is not None and found.time > last
        ]
        return {"save": sum(stalls)}

    def add_current_step(self, rows: StepTable, weights: NDArray[np.float64], now: float) -> None:
        """Adds the time since the last recorded step of an attempt that runs: the step that is not complete yet has the
        parts of the last one. What is longer than recent steps took is an evaluation, a save or a callback if rank 0 is
        in one, and else a stall.
        """
        heartbeat = self.history.heartbeats.get(0)
        part = OUTSIDE_PARTS.get(heartbeat.phase if heartbeat is not None else "", "stalled")
        left = self.at(now) - (self.cursor or 0)
        longest = round(float(rows.select(slice(-RECENT_STEPS, None)).seconds.max()) * NANOSECONDS)
        if part == "stalled" and left > 0:
            step = np.array([min(left, longest)])
            for name, amount in spread(step, weights[-1:]).items():
                self.add(name, amount)
        self.fill(part, now)


def to_nanoseconds(seconds: NDArray[np.float64]) -> Nanoseconds:
    """Non-negative nanoseconds; 0 for what was not recorded."""
    return np.round(np.clip(np.nan_to_num(seconds), 0.0, 1e9) * NANOSECONDS).astype(np.int64)


def spread(durations: Nanoseconds, weights: NDArray[np.float64]) -> dict[str, int]:
    """Divides every duration in the proportions of its weights; what rounding leaves is productive."""
    totals = weights.sum(axis=1)
    known = totals > 0
    shares = np.divide(weights, totals[:, None], out=np.zeros_like(weights), where=known[:, None])
    amounts = np.floor(shares * durations[:, None]).astype(np.int64)
    amounts[:, PART["productive"]] += durations - amounts.sum(axis=1)
    return {part: int(amounts[:, index].sum()) for part, index in PART.items() if amounts[:, index].any()}
