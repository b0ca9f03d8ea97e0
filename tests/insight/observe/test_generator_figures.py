"""The figures of generators in a report: measured ones from the events, next to the prediction."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.base.records.run_folder import RunFolder
from meshwright.planner.report.generator_figures import RolloutTimes, generator_rows, read_rollout_events


def event(step, **changed):
    """A step of 8 groups of 4 rollouts. Two generators work 0.75 of the time; the learner waits 0.4 of each second."""
    return {
        "kind": "rollouts",
        "attempt": 1,
        "step": step,
        "groups": [[group, [1, step], 0] for group in range(8)],
        "counts": {"generated": [40 * (step + 1), 400], "trained": [32 * (step + 1), 320]},
        "wait_seconds": 0.4,
        "generator_seconds": 2.0 * (step + 1),
        "generator_idle_seconds": 0.5 * (step + 1),
        "generators": 2,
    } | changed


def step_table(seconds):
    class Steps(SimpleNamespace):
        def __len__(self):
            return len(self.seconds)

    return Steps(seconds=np.array(seconds))


def rows_by_figure(events, plan):
    times = [RolloutTimes.of(found) for found in events]
    return {row.figure: row for row in generator_rows(times, step_table([1.0] * 8), plan)}


def test_measured_figures_stand_beside_the_prediction():
    plan = {"generators": {"wait": 0.3, "learner_seconds": 0.5, "group_seconds": 0.1, "asynchronous": 2}}
    rows = rows_by_figure([event(step) for step in range(10)], plan)
    assert rows["wait of the learner"].measured == pytest.approx(0.4)
    assert rows["wait of the learner"].predicted == 0.3
    assert rows["step without waiting"].measured == pytest.approx(0.6)
    assert rows["idle generators"].measured == pytest.approx(0.25)
    # 1.5 busy seconds per step for 40 rollouts of groups of four
    assert rows["generation of a group"].measured == pytest.approx(0.15)
    needed = rows["generators for a wait below 5%, asynchronous"]
    assert needed.measured == 3  # 0.95 x 10 groups x 0.15 s / 0.6 s = 2.4
    assert needed.predicted == 2


def test_a_run_without_rollouts_has_no_figures():
    assert generator_rows([], step_table([1.0]), {}) == []


def test_damaged_events_are_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.events(0).parent.mkdir(parents=True)
    events = [event(0), event(1, counts=[]), event(2, wait_seconds="soon"), event(3, attempt=2), event(4)]
    folder.events(0).write_text("".join(json.dumps(found | {"time": 1.0}) + "\n" for found in events))
    assert [times.step for times in read_rollout_events(folder, 1)] == [0, 4]
