"""Run folders in hostile situations: somebody else's files, symbolic links, and folders that vanish under a job."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from meshwright import train
from meshwright.base.config import LaunchConfig
from meshwright.base.records.events import read_events
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.incidents import Incident, read_heartbeats, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.inspect import list_rows
from meshwright.core.data.sample_lookup import open_sample_lookup
from meshwright.core.launch.job import acquire_lease_or_error, recording_outcome
from meshwright.core.recover import lease as lease_module
from meshwright.core.recover.lease import acquire_lease, acquire_next_lease
from meshwright.core.recover.supervisor import supervise
from meshwright.errors import CheckpointError, ConfigError
from meshwright.insight.report.run_report import build_report


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def snapshot(root: Path) -> dict[str, str]:
    """Every file below a folder with its content."""
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize("fresh", [False, True])
def test_folder_with_other_files_and_no_run_is_refused_before_anything_is_written(tmp_path, small, fresh):
    project = tmp_path / "project"
    project.mkdir()
    for name in ("a.py", "b.py", "c.py", "d.py", "run.toml"):  # a run file does not make a folder a run
        (project / name).write_text(name)
    (project / "events").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(
        ConfigError, match=r"is not a run folder: it has other files \(a\.py, b\.py, c\.py and 1 more\)"
    ):
        train(small(steps=1), run=project, fresh=fresh, quiet=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("names", [[], [".snapshot", "lost+found"], ["events", "attempts"]])
@pytest.mark.parametrize("fresh", [False, True])
def test_folder_without_files_of_somebody_else_is_used_as_it_is(folder, names, fresh):
    for name in names:
        (folder.root / name).mkdir(parents=True)
    folder.root.mkdir(exist_ok=True)
    (folder.root / "run.toml").write_text("steps = 1")
    assert acquire_lease(folder, fresh=fresh).attempt == 1
    assert os.listdir(folder.root.parent) == ["run"]


@pytest.mark.parametrize("where", ["current", "home"])
def test_fresh_does_not_rename_the_current_or_the_home_folder(folder, monkeypatch, where):
    acquire_lease(folder)
    inside = folder.root / "events"
    inside.mkdir()
    monkeypatch.chdir(inside) if where == "current" else monkeypatch.setenv("HOME", str(inside))
    with pytest.raises(ConfigError, match=f"--fresh would rename .*/run, which contains the {where} folder"):
        acquire_lease(folder, fresh=True)
    assert os.listdir(folder.root.parent) == ["run"]


@pytest.mark.parametrize(
    "name", ["events", "attempts", "checkpoints", "attempts/0001", "checkpoints/step-00000010.a0001"]
)
def test_folder_that_is_a_symbolic_link_is_refused_for_writing_and_reading(folder, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = folder.root / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    (folder.root / "run.toml").write_text("")
    for use in (
        lambda: acquire_lease(folder),
        lambda: acquire_lease(folder, fresh=True),
        lambda: list_rows(folder.root),
        lambda: build_report(folder),
        lambda: open_sample_lookup(folder.root),
    ):
        with pytest.raises(ConfigError, match=f"{name} is a symbolic link; expected a folder"):
            use()
    assert os.listdir(outside) == []


@pytest.mark.parametrize("name", ["run.toml", "identity.json", "plan.json", "events/rank-00000.jsonl"])
@pytest.mark.parametrize("kind", ["a symbolic link", "a pipe", "a folder"])
def test_file_of_another_kind_is_refused_before_the_run_starts(folder, tmp_path, name, kind):
    (tmp_path / "outside").write_text("mine")
    path = folder.root / name
    path.parent.mkdir(parents=True)
    if kind == "a symbolic link":
        path.symlink_to(tmp_path / "outside")
    else:
        os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    with pytest.raises(ConfigError, match=f"{name} is {kind}; expected a regular file"):
        acquire_lease(folder)
    assert (tmp_path / "outside").read_text() == "mine"


def test_run_folder_may_be_a_symbolic_link_itself(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    assert acquire_lease(RunFolder(tmp_path / "run")).attempt == 1
    assert (tmp_path / "elsewhere" / "attempts" / "0001" / "lease.json").exists()


@pytest.mark.parametrize("change", ["deleted", "moved", "replaced"])
def test_lease_is_lost_with_its_run_folder(folder, change):
    lease = acquire_lease(folder)
    lease.raise_if_lost()
    remove(folder, change)
    with pytest.raises(
        CheckpointError, match=f"run folder {folder.root} was deleted, moved or replaced while attempt 1"
    ):
        lease.raise_if_lost()
    with pytest.raises(CheckpointError, match="was deleted, moved or replaced"):
        acquire_next_lease(lease)
    assert folder.root.exists() == (change == "replaced")


def remove(folder: RunFolder, change: str) -> None:
    if change == "deleted":
        shutil.rmtree(folder.root)
        return
    folder.root.rename(folder.root.with_name("moved"))
    if change == "replaced":  # another process has begun a run under the same name
        acquire_lease(folder)
        lease = folder.attempt(1) / "lease.json"
        values = lease_module.read_lease(lease_module.open_run_store(folder), 1) | {"token": "another"}
        lease.write_text(lease_module.json.dumps(values | {"digest": lease_module.canonical_digest(values)}))


class FakeRanks:
    """Ranks that run until the supervisor kills them, or that fail at once."""

    launcher_pid = 0

    def __init__(self, folder: RunFolder, fails: bool) -> None:
        self.folder, self.killed, self.fails = folder, False, fails
        remove(folder, "moved")

    def poll(self, seconds: float) -> bool:
        return self.fails or self.killed

    def signal(self, number: int) -> None: ...

    def kill(self) -> None:
        self.killed = True

    def read_heartbeats(self) -> dict:
        return read_heartbeats(self.folder, 1)

    def results(self) -> list[None]:
        raise RanksFailed([Failure(0, "Killed", "rank 0 was killed by signal 9 (SIGKILL)", 8, 0.0)])


class NoViewer:
    def tick(self) -> None: ...

    def show(self, event: dict) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_supervisor_ends_the_job_and_never_creates_the_folder_again(folder, fails):
    started = []

    def start(attempt: int, restart: int) -> FakeRanks:
        started.append(FakeRanks(folder, fails))
        return started[-1]

    with pytest.raises(CheckpointError, match=f"run folder {folder.root} was deleted, moved or replaced"):
        supervise(folder, LaunchConfig(restarts=3), start, lambda attempt: NoViewer())
    assert len(started) == 1
    assert started[0].killed != fails
    assert not folder.root.exists()


class RanksWithoutDisk(FakeRanks):
    """A rank that trains for a second while its events cannot be written."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.killed, self.end = folder, False, time.monotonic() + 1.2
        self.heartbeat = Heartbeat(folder.heartbeat(1, 0))
        self.heartbeat.enter("forward", 3)
        self.heartbeat.set_lost_events(2)

    def poll(self, seconds: float) -> bool:
        time.sleep(seconds)
        self.heartbeat.set_lost_events(5)
        return time.monotonic() > self.end

    def results(self) -> list[str]:
        return ["done"]


def test_supervisor_reports_once_that_events_are_lost_and_their_number_at_the_end(folder):
    shown = []

    class Viewer(NoViewer):
        def show(self, event: dict) -> None:
            if event["kind"] == "events_lost":
                shown.append((event["rank"], event["message"]))

    launch = LaunchConfig(restarts=0)
    assert supervise(folder, launch, lambda *_: RanksWithoutDisk(folder), lambda attempt: Viewer()) == "done"
    assert shown == [
        (0, "rank 0 cannot write its events (is the disk full?); the training continues"),
        (0, "the last 5 event(s) of rank 0 could not be written"),
    ]
    lost = [e["count"] for e in read_events(folder.root / "events" / "supervisor.jsonl") if e["kind"] == "events_lost"]
    assert lost == [5, 5]


def test_under_torchrun_rank_0_stops_the_job_when_the_folder_is_gone(folder, monkeypatch):
    lease, signals = acquire_lease(folder), []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    remove(folder, "moved")
    with pytest.raises(CheckpointError, match="was deleted, moved or replaced"), recording_outcome(lease):
        raise RuntimeError("the checkpoint was not saved")
    assert signals == [15]
    assert not folder.root.exists()


def test_restart_by_torchrun_without_a_run_is_reported(folder, capsys):
    assert acquire_lease_or_error(folder, fresh=False, restarts=1).attempt == 1
    assert f"torchrun has restarted the ranks, and {folder.root} has no run" in capsys.readouterr().err
    assert acquire_lease_or_error(folder, fresh=True, restarts=2).attempt == 2  # a restart resumes
    assert capsys.readouterr().err == ""


def test_incident_on_a_full_disk_does_not_hide_the_outcome(folder, monkeypatch):
    acquire_lease(folder)

    def full_disk(path, value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.base.records.incidents.write_json", full_disk)
        Incident(1, "complete").write(folder)
    assert read_incidents(folder) == []
