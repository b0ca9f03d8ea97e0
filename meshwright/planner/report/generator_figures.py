"""What the generators of a run of reinforcement learning measured, next to the prediction. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any

from meshwright.base.history.step_table import StepTable
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.untrusted_records import WARMUP_STEPS, bounded_object, finite_number, natural_number
from meshwright.insight.report.compared_figures import ReportRow
from meshwright.planner.generation import MAX_WAIT

SECTION = "generators"


@dataclass(frozen=True)
class RolloutTimes:
    """One event `rollouts`."""

    step: int
    wait: float
    """seconds that the learner waited for the batch"""
    connected: float
    """seconds of all generators since the service started"""
    idle: float
    generators: int
    groups: int
    """groups that the step trains"""
    rollouts: int
    """rollouts in the log"""
    trained: int
    """rollouts that the run has trained"""

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> RolloutTimes | None:
        """None for an event that no run writes."""
        counts = bounded_object(event.get("counts"))
        wait, connected, idle = (
            finite_number(event.get(name)) for name in ("wait_seconds", "generator_seconds", "generator_idle_seconds")
        )
        step, generators = natural_number(event.get("step")), natural_number(event.get("generators"))
        rollouts, trained = (first_number(counts.get(name)) for name in ("generated", "trained"))
        groups = event.get("groups")
        if None in (wait, connected, idle, step, generators, rollouts, trained) or not isinstance(groups, list):
            return None
        assert wait is not None
        assert connected is not None
        assert idle is not None
        assert step is not None
        assert generators is not None
        assert rollouts is not None
        assert trained is not None
        return cls(step, wait, connected, idle, generators, len(groups), rollouts, trained)


def first_number(amount: Any) -> int | None:
    return natural_number(amount[0]) if isinstance(amount, list) and amount else None


def read_rollout_events(folder: RunFolder, attempt: int) -> list[RolloutTimes]:
    """The events of an attempt, in order; empty for a run without rl.objective."""
    events = (e for e in read_events(folder.events(0)) if e.get("kind") == "rollouts" and e.get("attempt") == attempt)
    return [times for event in events if (times := RolloutTimes.of(event)) is not None]


def generator_rows(events: Sequence[RolloutTimes], steps: StepTable, plan: Mapping[str, Any]) -> list[ReportRow]:
    """The measured figures of the generators, and how many the learner needs by them. The first steps are left out: a
    generator starts in them.
    """
    timed = [event for event in events if event.step >= events[0].step + WARMUP_STEPS] if events else []
    if len(timed) < 2 or not len(steps):
        return []
    predicted = bounded_object(plan.get("generators"))
    first, last = timed[0], timed[-1]
    rollouts_per_group = (last.trained - first.trained) / max(1, sum(event.groups for event in timed[1:]))
    generated = (last.rollouts - first.rollouts) / rollouts_per_group if rollouts_per_group else 0.0
    busy = (last.connected - last.idle) - (first.connected - first.idle)
    step_seconds = fmean(steps.seconds.tolist())
    waiting = fmean(event.wait for event in timed)
    working = max(step_seconds - waiting, 1e-9)
    idle = (last.idle - first.idle) / max(1e-9, last.connected - first.connected)
    rows = [
        row("wait of the learner", "share", min(1.0, waiting / step_seconds), predicted.get("wait")),
        row("step without waiting", "s", working, predicted.get("learner_seconds")),
        ReportRow(SECTION, "idle generators", "share", min(1.0, max(0.0, idle)), None),
    ]
    if generated > 0 and busy > 0:
        group = busy / generated
        groups = generated / (len(timed) - 1)
        needed = max(1, ceil((1 - MAX_WAIT) * groups * group / working - 1e-9))
        rows += [
            row("generation of a group", "s", group, predicted.get("group_seconds")),
            row(
                f"generators for a wait below {MAX_WAIT:.0%}, asynchronous",
                "count",
                float(needed),
                predicted.get("asynchronous"),
                f"{last.generators} worked; every step needed {groups:.1f} groups, with those that were left out",
            ),
        ]
    return rows


def row(figure: str, unit: str, measured: float, predicted: Any, note: str = "") -> ReportRow:
    return ReportRow(SECTION, figure, unit, measured, finite_number(predicted), note)
