"""The lease: a second writer is refused, a dead one is taken over, and its late checkpoints are never listed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.base.checkpoint.listing import (
    list_attempts,
    list_checkpoint_folders,
    list_leases,
    list_published,
    open_run_store,
    read_lease,
)
from meshwright.base.checkpoint.manifest import Manifest, canonical_digest
from meshwright.base.records.heartbeat import Heartbeat, process_stat
from meshwright.base.records.incidents import Incident, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.job import acquire_lease_or_error
from meshwright.core.recover import lease as lease_module
from meshwright.core.recover.lease import acquire_lease, exclusive_start, process_identity
from meshwright.errors import BusyError, CheckpointError, ConfigError

HOLD = """
import sys, time
from pathlib import Path
from meshwright.core.recover.lease import acquire_lease
from meshwright.base.records.run_folder import RunFolder
print(acquire_lease(RunFolder(Path(sys.argv[1]))).attempt, flush=True)
time.sleep(60)
"""
"""A process that holds the lease of the run folder in its first argument."""
HOLD_FRESH = HOLD.replace("]))).attempt", "])), fresh=True).attempt").replace(
    "print(acquire",
    """set_aside = RunFolder.set_aside
def slow_set_aside(folder):
    aside = set_aside(folder)
    print("renamed", flush=True)
    sys.stdin.readline()
    return aside
RunFolder.set_aside = slow_set_aside
print(acquire""",
)
"""A process that sets the run aside, and waits for a line of input before it goes on."""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def rewrite(folder, attempt, **changes):
    """Rewrites the lease as another process would have written it."""
    values = read_lease(open_run_store(folder), attempt) | changes
    path = folder.attempt(attempt) / "lease.json"
    path.write_text(json.dumps(values | {"digest": canonical_digest(values)}))


def manifest(step: int, attempt: int) -> Manifest:
    empty = {key: {} for key in ("layout", "identity", "made_by", "data", "rng", "schedule", "scaler", "counters")}
    return Manifest("r", 1, step, attempt, 0, "", **empty, tensors={}, parts={})


def publish(folder, step, attempt):
    name = f"checkpoints/step-{step:08d}.a{attempt:04d}/manifest.json"
    assert open_run_store(folder).publish_if_absent(name, manifest(step, attempt).encode())


def test_second_job_is_refused_with_host_and_pid_of_the_lease_holder(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.root)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"1\n"
        lease = read_lease(open_run_store(folder), 1)
        with pytest.raises(BusyError) as refused:
            acquire_lease(folder)
        message = str(refused.value)
        assert f"process {holder.pid} on {lease['host']} since {lease['since']}" in message
        assert refused.value.exit_code == 9
    finally:
        holder.kill()
        holder.wait()
    assert acquire_lease(folder).attempt == 2  # the holder is dead, so the next attempt takes over


def test_one_of_many_concurrent_jobs_acquires_the_lease(folder):
    acquire_lease(folder)
    Incident(1, "complete").write(folder)
    results = []
    code = "import sys; from meshwright.base.records.run_folder import RunFolder; from pathlib import Path\n"
    code += "from meshwright.core.recover.lease import acquire_lease\n"
    code += (
        "sys.stdin.readline(); print(acquire_lease(RunFolder(Path(sys.argv[1]))).attempt, flush=True); sys.stdin.read()"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for job in jobs:
        job.stdin.write(b"\n")
        job.stdin.flush()
    for job in jobs:  # the holder keeps the lease until all jobs have an answer
        results.append(job.stdout.readline().strip() or job.stderr.read().splitlines()[-1])
    for job in jobs:
        job.communicate(timeout=60)
    assert results.count(b"2") == 1, results
    assert sum(b"is held by process" in result for result in results) == 3, results


@pytest.mark.parametrize(
    "change",
    [
        {"started": 1},  # the pid belongs to another process by now
        {"pid": 1 << 22},
    ],
)
def test_lease_of_a_dead_process_is_taken_over_though_its_pid_is_reused(folder, change):
    acquire_lease(folder)
    rewrite(folder, 1, token="another", **change)
    assert acquire_lease(folder).attempt == 2


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"host": "elsewhere", "boot": "x"}])
def test_lease_holder_on_another_host_is_alive_while_its_heartbeat_advances(folder, change):
    # another boot, another container, another host; its pid has no meaning here
    acquire_lease(folder)
    rewrite(folder, 1, token="another", **change)
    page = Heartbeat(folder.heartbeat(1, 0))
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            page.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(BusyError, match="is held by process"):
            acquire_lease(folder, observe=2.0)
    finally:
        stop.set()
        beating.join()
    assert acquire_lease(folder, observe=0.5).attempt == 2


def test_killed_process_that_is_not_reaped_holds_no_lease(folder):
    """Under a container's init process that does not reap, a killed supervisor stays a zombie for ever."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.root)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"1\n"
        os.kill(holder.pid, signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and remains a zombie
        assert Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert process_stat(holder.pid) == {}
        assert acquire_lease(folder).attempt == 2
    finally:
        holder.wait()


def test_lease_with_missing_or_odd_fields_is_refused_or_taken_over_without_a_traceback(folder):
    acquire_lease(folder)
    path = folder.attempt(1) / "lease.json"
    values = read_lease(open_run_store(folder), 1) | {"token": 5}
    without_host = {key: value for key, value in values.items() if key not in ("host", "since")}
    path.write_text(json.dumps(without_host | {"digest": canonical_digest(without_host)}))
    with pytest.raises(BusyError, match="is held by process"):
        acquire_lease(folder)
    for field, odd in (("started", []), ("boot", {}), ("namespace", None), ("pid", 10**30)):
        changed = values | {field: odd}
        path.write_text(json.dumps(changed | {"digest": canonical_digest(changed)}))
        assert acquire_lease(folder, observe=0.1).attempt == 2
        shutil.rmtree(folder.attempt(2))


def test_fresh_does_not_rename_a_run_that_is_held(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.root)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(BusyError, match=f"is held by process {holder.pid}"):
            acquire_lease(folder, fresh=True)
        assert isinstance(acquire_lease_or_error(folder, fresh=True), BusyError)
    finally:
        holder.kill()
        holder.wait()
    assert os.listdir(folder.root.parent) == ["run"]
    assert acquire_lease(folder, fresh=True).attempt == 1
    assert sorted(os.listdir(folder.root.parent)) == ["run", "run.old-1"]
    assert read_incidents(RunFolder(folder.root.with_name("run.old-1")))[-1].outcome == "stopped"


def test_job_that_resumes_while_fresh_renames_the_folder_is_refused(folder):
    """The resuming job must neither find the folder free nor start from zero in its place."""
    acquire_lease(folder)
    publish(folder, 10, 1)
    Incident(1, "complete").write(folder)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    fresh = subprocess.Popen([sys.executable, "-c", HOLD_FRESH, str(folder.root)], **pipes)
    try:
        assert fresh.stdout.readline() == b"renamed\n"
        resume = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.root)], **pipes)
        with pytest.raises(subprocess.TimeoutExpired):
            resume.wait(1.5)  # it waits for the job that renames the folder
        fresh.stdin.write(b"\n")
        fresh.stdin.flush()
        assert fresh.stdout.readline() == b"1\n"
        _, error = resume.communicate(timeout=30)
        assert f"is held by process {fresh.pid}".encode() in error
    finally:
        for job in (fresh, resume):
            job.kill()
            job.communicate()
    assert [entry.step for entry in list_published(open_run_store(RunFolder(folder.root.with_name("run.old-1"))))] == [
        10
    ]
    assert list_published(open_run_store(folder)) == []


def test_job_does_not_wait_for_ever_for_a_stopped_process_that_starts_beside_it(folder, monkeypatch):
    acquire_lease(folder)
    Incident(1, "complete").write(folder)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    starting = subprocess.Popen([sys.executable, "-c", HOLD_FRESH, str(folder.root)], **pipes)
    try:
        assert starting.stdout.readline() == b"renamed\n"
        monkeypatch.setattr("meshwright.core.recover.lease.START_SECONDS", 0.1)
        with pytest.raises(
            BusyError, match=r"another job has been starting in .* for 0\.1 s; try to continue or end it"
        ):
            acquire_lease(folder)
    finally:
        starting.kill()
        starting.communicate()


def test_job_starts_beside_a_run_that_another_job_starts_and_in_a_folder_that_somebody_has_locked(folder, monkeypatch):
    """Jobs of different runs in one folder wait neither for each other nor for a lock on that folder."""
    monkeypatch.setattr("meshwright.core.recover.lease.START_SECONDS", 0.0)
    parent = os.open(folder.root.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        with exclusive_start(RunFolder(folder.root.with_name("other"))):
            assert acquire_lease(folder).attempt == 1
    finally:
        os.close(parent)
    assert os.listdir(folder.root.parent) == ["run"]


def test_holder_on_another_host_is_observed_once_and_before_the_lock(folder, monkeypatch):
    acquire_lease(folder)
    rewrite(folder, 1, boot="elsewhere", token="of another process")
    locked, observed, right = [], [], lease_module.try_lock
    monkeypatch.setattr(lease_module, "holder_is_alive", lambda *_: observed.append(bool(locked)))  # it is dead
    monkeypatch.setattr(lease_module, "try_lock", lambda file: locked.append(file) or right(file))
    assert acquire_lease(folder).attempt == 2
    assert observed == [False]
    assert len(locked) == 1


def test_lock_that_cannot_be_created_is_left_out(folder):
    """A folder where no file can be created cannot be renamed either."""
    folder.root.mkdir()
    (folder.root.parent / ".run.lock").symlink_to("elsewhere")
    assert acquire_lease(folder).attempt == 1
    assert not (folder.root.parent / "elsewhere").exists()
    lease = lease_module.Lease(folder, 1)
    shutil.rmtree(folder.root.parent)
    with pytest.raises(CheckpointError, match="was deleted, moved or replaced"):
        lease_module.acquire_next_lease(lease)


@pytest.mark.parametrize(
    "name", ["99999999999999999999", "-001", "1", "00001", "0000", "abcd", "\u0663\u0663\u0663\u0663"]
)
def test_attempt_folder_with_another_name_is_ignored_everywhere(folder, name):
    acquire_lease(folder)
    publish(folder, 10, 1)
    shutil.copytree(folder.attempt(1), folder.root / "attempts" / name)
    store = open_run_store(folder)
    assert folder.attempts() == list_attempts(store) == [1]
    assert [attempt for attempt, _ in list_leases(store)] == [1]
    assert [entry.step for entry in list_published(store)] == [10]
    assert acquire_lease(folder).attempt == 2


def test_copy_of_an_attempt_folder_under_another_number_hides_no_checkpoint(folder):
    acquire_lease(folder)
    publish(folder, 10, 1)
    rewrite(folder, 1, token="another", started=1)
    acquire_lease(folder)
    publish(folder, 20, 2)
    shutil.copytree(folder.attempt(1), folder.attempt(7))  # its lease inherits nothing
    store = open_run_store(folder)
    assert [entry.step for entry in list_published(store)] == [20, 10]
    assert [attempt for attempt, _ in list_leases(store)] == [2, 1]
    assert acquire_lease(folder).attempt == 8  # the number has been used


@pytest.mark.parametrize(
    "path", ["attempts/999999999/lease.json", "checkpoints/step-00000010.a999999999/manifest.json"]
)
def test_attempt_number_at_the_end_of_the_range_is_refused(folder, path):
    (folder.root / path).parent.mkdir(parents=True)
    (folder.root / path).write_text("{}")
    with pytest.raises(ConfigError, match="has an attempt 999999999, the largest number"):
        acquire_lease(folder)
    assert not folder.attempt(1_000_000_000).exists()


def test_checkpoint_name_with_another_spelling_of_its_number_is_not_listed(folder):
    acquire_lease(folder)
    for name in ("step-000000010.a0001", "step-00000010.a00001", "step-\u0663\u06630000010.a0001", "step-00000010.a1"):
        (folder.root / "checkpoints" / name).mkdir(parents=True)
    assert list_checkpoint_folders(open_run_store(folder)) == []


def test_attempt_folder_with_files_of_somebody_else_is_not_used(folder):
    acquire_lease(folder)
    folder.attempt(2).mkdir()
    (folder.attempt(2) / "rank-00000.log").write_text("another log")
    assert acquire_lease(folder).attempt == 3


def test_checkpoint_of_a_fenced_attempt_is_never_listed(folder):
    acquire_lease(folder)
    publish(folder, 10, 1)
    rewrite(folder, 1, token="another", started=1)
    acquire_lease(folder)
    publish(folder, 20, 1)  # the fenced holder continues
    publish(folder, 15, 2)
    store = open_run_store(folder)
    assert [entry.name for entry in list_published(store)] == ["step-00000015.a0002", "step-00000010.a0001"]
    late = next(entry for entry in list_checkpoint_folders(store) if entry.step == 20)
    assert late.fenced
    assert "published by attempt 1 after attempt 2 had taken over the run" in late.problem
    rewrite(folder, 2, token="another", started=1)
    acquire_lease(folder)
    assert [entry.step for entry in list_published(store)] == [15, 10]  # a later holder does not inherit it either


def test_fenced_attempt_cannot_save_a_checkpoint(folder):
    # the saver notices it before readers have to ignore the checkpoint
    import torch

    from meshwright.base.checkpoint.listing import RunLineage
    from meshwright.base.config import CheckpointConfig
    from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver
    from meshwright.core.parallel.world import World

    acquire_lease(folder)
    facts = {"layout": {}, "identity": {}, "made_by": {}}
    state = {"model/a": torch.ones(3)}
    saver = CheckpointSaver(
        CheckpointConfig(), open_run_store(folder), World(), RunLineage("r", 1, {}), 1, facts, lambda: state
    )
    common = {"data": {}, "rng": {}, "schedule": {}, "scaler": {}, "counters": {}}
    (first,) = saver.save(CheckpointMetadata(1, common, "data/0", {}), wait=True)
    assert first.error is None
    rewrite(folder, 1, token="another", started=1)
    acquire_lease(folder)
    (second,) = saver.save(CheckpointMetadata(2, common, "data/0", {}), wait=True)
    assert isinstance(second.error, BusyError)
    assert "attempt 2 has taken over the run" in str(second.error)
    assert [entry.step for entry in list_published(open_run_store(folder))] == [1]


def test_lease_of_an_ended_attempt_is_free_at_once(folder):
    acquire_lease(folder)
    rewrite(folder, 1, token="another", boot="another")
    Incident(1, "complete").write(folder)
    start = time.monotonic()
    assert acquire_lease(folder).attempt == 2
    assert time.monotonic() - start < 3  # without observing the beat counter


def test_truncated_lease_is_not_listed(folder):
    acquire_lease(folder)
    (folder.attempt(1) / "lease.json").write_text('{"pid": 1')
    assert list_leases(open_run_store(folder)) == []
    folder.attempt(1).joinpath("lease.json").unlink()
    assert acquire_lease(folder).attempt == 1


def test_lease_identifies_its_process_by_more_than_a_pid():
    assert {"host", "pid", "started", "boot", "namespace", "token"} <= process_identity().keys()
