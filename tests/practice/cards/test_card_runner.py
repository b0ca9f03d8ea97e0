"""Experiments run in a process of their own: their result arrives as data, and their limits hold."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from meshwright_practice.cards.card import Experiment
from meshwright_practice.cards.runner import RunLimits
from meshwright_practice.pictures import Bars


def run(runner, name, **knobs):
    return runner.run(Experiment(f"small:{name}"), knobs)


def limited(runner, monkeypatch, seconds, bytes_=3 << 30):
    monkeypatch.setattr(runner, "limits", RunLimits(seconds, bytes_))
    return runner


def test_an_experiment_returns_its_observation_as_data(runner):
    found = run(runner, "double", size=8)
    assert found.failure == ""
    assert found.observation.values == {"size": 8.0, "doubled": 16.0}
    assert found.observation.picture == Bars("Values", "", ("size", "doubled"), {"value": (8.0, 16.0)})
    assert found.observation.notes == ("A note about this run.",)


def test_an_experiment_runs_on_several_ranks(runner):
    assert run(runner, "ranks_sum").observation.values["sum"] == 2.0


def test_a_hang_ends_at_the_limit_with_all_of_its_ranks(runner, monkeypatch):
    found = run(limited(runner, monkeypatch, 1.0), "hang_with_ranks")
    assert found.observation is None
    assert found.failure == "it had not ended after 1 s and was killed"
    assert children_of(runner._process.pid) == []


def children_of(pid: int) -> list[str]:
    deadline = time.monotonic() + 20
    while (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("name", ["use_memory", "use_memory_in_child"])
def test_too_much_memory_ends_an_experiment(runner, monkeypatch, name):
    found = run(limited(runner, monkeypatch, 60.0, 300 << 20), name)
    assert "of memory, more than 0.293 GiB, and was killed" in found.failure
    assert found.peak_bytes > 300 << 20


def test_a_crash_names_the_signal_and_the_next_experiment_runs(runner):
    assert run(runner, "crash").failure == "signal SIGSEGV ended it before it had a result"
    assert run(runner, "double", size=4).observation.values["doubled"] == 8.0


def test_an_exception_is_one_line_and_the_log_is_kept(runner):
    found = run(runner, "fail")
    assert found.failure == "ValueError: the experiment is broken"
    assert "before the failure" in found.log
    assert "AttributeError" in run(runner, "missing").failure
    assert "ModuleNotFoundError" in runner.run(Experiment("no_module:run"), {}).failure


def test_progress_reports_seconds_and_memory(runner):
    seen = []
    runner.run(Experiment("small:ranks_sum"), {}, lambda seconds, used: seen.append((seconds, used)))
    assert seen
    assert max(used for _, used in seen) > 1 << 20


def test_temporary_files_of_an_experiment_are_removed(runner):
    assert run(runner, "leave_files").observation.values["inside"] == 1.0
    assert [path.name for path in runner._folder.path.iterdir()] == ["lock"]
