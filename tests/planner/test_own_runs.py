"""`plan --replay FOLDER`: the error of own runs before and after corrections by the other runs of their machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from zlib import crc32

import pytest

from meshwright.base.cli import main
from meshwright.base.config import config_from_dict
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.errors import ConfigError
from meshwright.planner.calibration import own_runs
from meshwright.planner.calibration.calibration_log import CalibrationRecord
from meshwright.planner.calibration.own_runs import replay_own_runs
from meshwright.planner.workload.planned_job import PlannedJob


def write_run(folder, name, ratio, memory=None, host="a", time=None, lines=()):
    """A run folder whose step took `ratio` times as long as predicted."""
    job = PlannedJob.from_config(config_from_dict({}), preset_cluster("h100", 8))
    record = replace(CalibrationRecord.from_job(job, (0.5, 0.5 * ratio), memory), host=host)
    ended = {
        "kind": "calibrated",
        "attempt": 1,
        "rank": 0,
        "time": time or float(crc32(name.encode()) % 2**31),
        "steps": 12,
    }
    file = folder / name / own_runs.EVENTS
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{line}\n" for line in (*lines, json.dumps(ended | asdict(record)))))
    return file


def test_run_is_corrected_by_the_other_runs_only(tmp_path):
    for name, ratio in (("one", 1.5), ("two", 1.5), ("three", 6.0)):
        write_run(tmp_path, name, ratio, memory=(100.0, 110.0))
    replayed = replay_own_runs(tmp_path)
    runs = {run["id"]: run["seconds"] for run in replayed["records"]}
    assert [run["runs"] for run in runs.values()] == [2, 2, 2]
    assert runs["three"]["factor"] == pytest.approx(1.5 ** (2 / 2.5))  # its own ratio of 6 does not count
    assert runs["one"]["factor"] == pytest.approx((1.5 * 6.0) ** (0.5 * 2 / 2.5))
    assert runs["three"]["error"] == pytest.approx(1 / 6 - 1)
    assert runs["three"]["corrected_error"] == pytest.approx(runs["three"]["factor"] / 6 - 1)
    seconds, memory = replayed["scores"]
    assert (seconds["runs"], seconds["corrected_runs"]) == (3, 3)
    assert memory["before"]["median"] == pytest.approx(1 - 1 / 1.1)
    assert memory["after"]["median"] == pytest.approx(1 - 1.1 ** (2 / 2.5) / 1.1)


def test_single_run_is_not_corrected(tmp_path):
    write_run(tmp_path, "one", 1.5)
    [run] = replay_own_runs(tmp_path)["records"]
    assert (run["seconds"]["factor"], run["seconds"]["runs"]) == (1.0, 0)
    assert run["memory"] is None


@pytest.mark.parametrize("host", ["b", ""])
def test_runs_of_other_or_unknown_hosts_do_not_correct(tmp_path, host):
    write_run(tmp_path, "one", 1.5, host="a" if host else "")
    write_run(tmp_path, "two", 1.5, host=host)
    assert [run["seconds"]["runs"] for run in replay_own_runs(tmp_path)["records"]] == [0, 0]


def test_copy_of_a_run_is_left_out(tmp_path):
    write_run(tmp_path, "one", 1.5, time=7.0)
    write_run(tmp_path, "other", 1.5, time=7.0)
    replayed = replay_own_runs(tmp_path)
    assert [run["id"] for run in replayed["records"]] == ["one"]
    assert replayed["left_out"] == [{"id": "other", "reason": "a copy of one"}]


def test_unfinished_damaged_and_foreign_folders_are_left_out_with_the_reason(tmp_path):
    write_run(tmp_path, "good", 1.5, lines=['{"kind": "step", "loss": "calibrated"}', "{torn"])
    write_run(tmp_path, "damaged", 1.5).write_text('{"kind": "calibrated", "host": 1}\n')
    write_run(tmp_path, "nested", 1.5).write_text('{"kind": "calibrated", "a": ' + "[" * 100_000)
    write_run(tmp_path, "unfinished", 1.5).write_text('{"kind": "step"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    linked = tmp_path / "linked" / own_runs.EVENTS
    linked.parent.mkdir(parents=True)
    linked.symlink_to(tmp_path / "good" / own_runs.EVENTS)
    replayed = replay_own_runs(tmp_path)
    assert [run["id"] for run in replayed["records"]] == ["good"]
    assert {row["id"]: row["reason"] for row in replayed["left_out"]} == {
        "damaged": "its calibration event is damaged",
        "nested": "its calibration event is damaged",
        "unfinished": "not finished, too short, or on a machine that was not measured",
        "empty": "no run folder",
        "linked": "no run folder",
    }


@pytest.mark.parametrize("time", [10**400, float("nan"), float("inf"), -1.0, "7", True])
def test_run_that_ended_at_no_possible_time_is_left_out(tmp_path, time):
    write_run(tmp_path, "good", 1.5)
    write_run(tmp_path, "other", 1.5, time=time)
    replayed = replay_own_runs(tmp_path)
    assert [run["id"] for run in replayed["records"]] == ["good"]
    assert replayed["left_out"] == [{"id": "other", "reason": "its calibration event is damaged"}]


def test_linked_folder_of_events_is_not_read(tmp_path):
    outside = write_run(tmp_path / "elsewhere", "run", 1.5).parent
    write_run(tmp_path / "runs", "good", 1.5)
    (tmp_path / "runs" / "linked").mkdir()
    (tmp_path / "runs" / "linked" / "events").symlink_to(outside)
    replayed = replay_own_runs(tmp_path / "runs")
    assert replayed["left_out"] == [{"id": "linked", "reason": "no run folder"}]


def test_number_of_runs_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(own_runs, "MAX_RUNS", 2)
    for index in range(4):
        write_run(tmp_path, str(index), 1.0 + index)
    replayed = replay_own_runs(tmp_path)
    assert [len(replayed[key]) for key in ("records", "left_out")] == [2, 2]


def test_folder_with_more_entries_than_are_read_is_said_to_be_cut(tmp_path, monkeypatch, capsys):
    for index in range(3):
        write_run(tmp_path, str(index), 1.0 + index)
    assert replay_own_runs(tmp_path)["notes"] == []
    monkeypatch.setattr(own_runs, "MAX_ENTRIES", 2)
    note = "the folder has more than 2 entries, and the others are not read"
    replayed = replay_own_runs(tmp_path)
    assert (len(replayed["records"]), replayed["notes"]) == (2, [note])
    main(["plan", "--replay", str(tmp_path)])
    assert note in capsys.readouterr().out


def test_folder_without_finished_runs_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no finished run of"):
        replay_own_runs(tmp_path)


def test_plan_replay_of_a_folder_prints_errors_before_and_after(tmp_path, capsys):
    for name in ("one", "three"):
        write_run(tmp_path, name, 2.0)
    main(["plan", "--replay", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "-50.0%" in shown  # before
    assert f"{2 ** (1 / 1.5) / 2 - 1:+.1%}" in shown  # after
    main(["plan", "--replay", str(tmp_path), "--json"])
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores[0]["after"]["median"] < scores[0]["before"]["median"] == pytest.approx(0.5)
