"""One incident from start to score through the command line: hidden, bounded, and explained after a kill -9."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from meshwright_practice.incidents import job as jobs
from meshwright_practice.incidents.catalogue import CLASSES
from meshwright_practice.incidents.incident import Arrangement, draw_incident, write_seal
from meshwright_practice.incidents.job import incident_folder, read_job, start_job, stop_job
from meshwright_practice.incidents.session import IncidentSession, fault_has_happened
from meshwright_practice.progress import PracticeProgress, progress_file, save_progress

from meshwright.base.cli.main import main
from meshwright.base.records.heartbeat import process_start
from meshwright.errors import BusyError, ConfigError
from tests.kit.recorded_history import RecordedRun

SECONDS = 120.0


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    for folder in (tmp_path / "home" / "practice" / "incidents").glob("[0-9]*"):
        stop_job(folder, 3.0)


def call(capsys, *args):
    """The JSON that a command prints."""
    main(["practice", "incident", *args, "--json"])
    return json.loads(capsys.readouterr().out)


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(text) for text in found.stdout.split()]


def recorded_steps(run: Path) -> int:
    path = run / "events" / "rank-00000.jsonl"
    return path.read_text().count('"kind":"step"') if path.exists() else 0


def leaks(texts, incident):
    """The words in these texts that tell what is wrong."""
    [act] = incident.arrangement.acts
    words = [incident.kind.name, "MESHWRIGHT_FAULT", act.fault, act.fault.split("@")[0], incident.kind.fix]
    return [word for word in words if any(word.encode() in text for text in texts)]


def test_incident_is_hidden_while_it_runs_and_scored_after_a_kill(capsys):
    started = call(capsys, "--class", "data-bound", "--seed", "4", "--steps", "200")
    incident = draw_incident(4, CLASSES, "data-bound", 200)
    run, pid = Path(started["run"]), started["pid"]
    wait_until(lambda: recorded_steps(run) > incident.values["step"] + 25)

    processes = [pid, *children(pid)]
    assert len(processes) > incident.values["ranks"]
    files = [path.read_bytes() for path in run.parent.rglob("*") if path.is_file()]
    shown = [Path(f"/proc/{p}/{name}").read_bytes() for p in processes for name in ("cmdline", "environ")]
    assert not leaks([*files, *shown, json.dumps(started).encode(), progress_file().read_bytes()], incident)

    with pytest.raises(SystemExit) as refused:
        main(["practice", "incident"])
    assert refused.value.code == BusyError.exit_code
    assert "is open" in capsys.readouterr().err

    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(process_start(p) for p in processes))  # the ranks end with their launcher
    main(["practice", "incident", "--list"])
    assert "the job was killed" in capsys.readouterr().out

    step = f"step={incident.values['step']}"
    answer = ["class=data-bound", "rank=none", step, "fix=faster-input", "evidence=all ranks wait for their samples"]
    closed = call(capsys, "--answer", *answer)
    assert closed["score"]["truth"] == 100, closed["score"]
    assert closed["story"]["diagnose_names_it"]
    assert any("injection" in moment["text"] for moment in closed["story"]["timeline"])
    [row] = call(capsys, "--list")["incidents"]
    assert (row["state"], row["class"], row["truth"]) == ("answered", "data-bound", 100)
    assert call(capsys, "--story")["story"]["name"] == "data-bound"


@pytest.fixture
def open_incident(home, monkeypatch):
    """An incident whose job is a process that sleeps."""
    monkeypatch.setattr(jobs, "MODULE", "http.server")  # it does nothing, and ends by SIGTERM
    IncidentSession().start(7, "straggler", 40)
    return incident_folder("0001")


def test_hints_cost_points_and_end(open_incident, capsys):
    assert [call(capsys, "--hint")["cost"] for _ in range(3)] == [10, 20, 30]
    with pytest.raises(SystemExit) as refused:
        main(["practice", "incident", "--hint"])
    assert refused.value.code == 2
    call(capsys, "--stop")
    score = call(capsys, "--answer", "class=straggler")["score"]
    assert (score["truth"], score["hint_cost"], score["total"]) == (40, 30, 10)


def test_answer_before_the_fault_is_not_scored(open_incident, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["practice", "incident", "--answer", "class=straggler"])
    assert refused.value.code == 2
    assert "the fault of incident 0001 has not happened yet" in capsys.readouterr().err
    assert call(capsys, "--list")["incidents"][0]["state"] == "open"


@pytest.mark.parametrize(("steps", "happened"), [(0, False), (5, False), (21, True)])
def test_fault_has_happened_when_its_step_is_on_record(steps, happened, tmp_path):
    incident = replace(draw_incident(7, CLASSES, "straggler", 40), arrangement=Arrangement((), 0, (20, 24)))
    run = RecordedRun(tmp_path, ranks=1)
    run.start()
    for step in range(steps):
        run.step(step)
    assert fault_has_happened(incident, run.history()) == happened


@pytest.mark.parametrize("state", ["open", "answered", "given up"])
def test_name_that_is_not_a_number_never_becomes_a_path(state, home, monkeypatch, capsys):
    def refuse(name):
        raise AssertionError(name)

    for module in ("session", "job"):
        monkeypatch.setattr(f"meshwright_practice.incidents.{module}.incident_folder", refuse)
    entry = {"state": state, "incident": 7}
    save_progress(PracticeProgress(incidents={"../../x": entry, "\u0661\u0662\u0663\u0664": entry}), progress_file())
    rows = call(capsys, "--list")["incidents"]
    assert [row["incident"] for row in rows] == ["../../x", "\u0661\u0662\u0663\u0664"]
    IncidentSession().delete_old_runs()
    with pytest.raises(SystemExit):
        main(["practice", "incident", "--story"])
    assert "no incident" in capsys.readouterr().err


def test_stop_ends_the_job_and_keeps_the_incident_open(open_incident, capsys):
    pid = read_job(open_incident).pid
    stopped = call(capsys, "--stop")
    assert stopped["job"] == "killed"  # this process does not record its end
    assert not process_start(pid)
    assert call(capsys, "--list")["incidents"][0]["state"] == "open"


def test_story_gives_up_and_works_without_records(open_incident, capsys):
    closed = call(capsys, "--story")
    assert closed["score"] is None
    assert closed["story"]["findings"] == []
    assert (open_incident / "story.json").exists()
    assert call(capsys, "--list")["incidents"][0]["state"] == "given up"


def test_missing_folder_closes_the_incident(open_incident, capsys):
    stop_job(open_incident)
    open_incident.rename(open_incident.parent / "elsewhere")
    main(["practice", "incident", "--list"])
    out, err = capsys.readouterr()
    assert "lost" in out
    assert "is gone" in err


def test_damaged_seal_closes_the_incident(open_incident, capsys):
    (open_incident / "sealed.txt").write_text("x")
    with pytest.raises(SystemExit) as refused:
        main(["practice", "incident", "--answer", "rank=1"])
    assert refused.value.code == 2
    assert "damaged" in capsys.readouterr().err
    assert read_job(open_incident).status != "running"


@pytest.mark.parametrize(
    "entry", [1, {"state": "open", "started": "x", "hints": "y"}, {"state": "open", "hints": -3}, {}]
)
def test_damaged_progress_entry_is_survived(entry, home, capsys):
    folder = incident_folder("0001")
    folder.mkdir(parents=True)
    write_seal(folder, draw_incident(1, CLASSES, "bubble", 40))
    save_progress(PracticeProgress(incidents={"0001": entry, "../../x": {"state": "open"}}), progress_file())
    main(["practice", "incident", "--list"])
    capsys.readouterr()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": "x"}', '{"pid": 1, "start": 1, "boot": ""}', "x" * 100])
def test_damaged_job_record_counts_as_killed(content, tmp_path):
    (tmp_path / "job.json").write_text(content)
    assert read_job(tmp_path).status == "killed"
    assert stop_job(tmp_path).status == "killed"


def test_pid_of_another_process_is_not_signalled(tmp_path):
    """The pid was given to another process since: its start differs."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = {"pid": process.pid, "start": process_start(process.pid) - 1, "boot": jobs.read_text(jobs.BOOT_ID)}
        (tmp_path / "job.json").write_text(json.dumps(record))
        assert stop_job(tmp_path).status == "killed"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_folder_that_cannot_be_created_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"practice/incidents.*cannot be"):
        IncidentSession().start(1)


@pytest.mark.parametrize("function", ["write_seal", "save_progress"])
def test_full_disk_is_named(function, monkeypatch):
    def fail(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jobs, "MODULE", "http.server")
    monkeypatch.setattr(f"meshwright_practice.incidents.session.{function}", fail)
    with pytest.raises(ConfigError, match="No space left"):
        IncidentSession().start(1, None, 40)


@pytest.mark.parametrize(
    "args",
    [
        ["--answer"],
        ["--hint"],
        ["--stop"],
        ["--story"],
        ["--hint", "--stop"],
        ["--list", "--seed", "1"],
        ["--class", "x"],
    ],
)
def test_mistake_is_one_line(args, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["practice", "incident", *args])
    assert refused.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [12, 600])
def test_job_that_hangs_ends_in_time_or_when_it_is_stopped(limit, tmp_path, monkeypatch):
    """A rank that is stopped or sleeps does not outlive the limit of time, nor --stop."""
    incident = draw_incident(3, CLASSES, "hang", 400)
    write_seal(tmp_path, incident)
    code = "import sys, meshwright_practice.incidents.launcher as l; from pathlib import Path\n"
    code += f"l.LIMIT_SECONDS, l.GRACE_SECONDS = {limit}, 5\nsys.exit(l.main(Path(sys.argv[1])))"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    record = {"pid": process.pid, "start": process_start(process.pid), "boot": jobs.read_text(jobs.BOOT_ID)}
    (tmp_path / "job.json").write_text(json.dumps(record))
    wait_until(lambda: recorded_steps(tmp_path / "run") > 3 or process.poll() is not None)
    ranks = children(process.pid)
    if limit == 600:
        wait_until(lambda: recorded_steps(tmp_path / "run") >= incident.values["step"])
        stop_job(tmp_path, 8.0)
    process.wait(SECONDS)
    wait_until(lambda: not any(process_start(pid) for pid in ranks))
    assert read_job(tmp_path).outcome in ("stopped", "")


@pytest.mark.long
def test_launcher_that_is_started_twice_in_one_folder_is_refused(tmp_path):
    write_seal(tmp_path, draw_incident(1, CLASSES, "data-bound", 40))
    start_job(tmp_path)
    try:
        with pytest.raises(ConfigError, match="cannot be started"):
            start_job(tmp_path)
    finally:
        stop_job(tmp_path)
