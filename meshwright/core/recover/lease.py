"""Single-writer lease of a run folder: the job that trains holds the lease of the newest attempt. Torch-free.

The attempt number is a fencing epoch, acquired by publishing `attempts/NNNN/lease.json` if it is absent. On the same
host the holder is alive while its process runs (same boot, same pid, same start time). Seen from another host, the
holder is alive while its beat counter advances. No decision reads a wall clock or the clock of another machine.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.listing import (
    LEASE_FILE,
    list_attempts,
    list_checkpoint_folders,
    list_leases,
    list_published,
    open_run_store,
    read_fence,
    read_lease,
)
from meshwright.base.checkpoint.manifest import canonical_digest
from meshwright.base.records.attempt_files import has_ended, read_beat, read_incident, read_text, write_beat
from meshwright.base.records.heartbeat import process_start, read_heartbeat
from meshwright.base.records.incidents import Incident
from meshwright.base.records.run_folder import MAX_ATTEMPT, RunFolder
from meshwright.base.store.interface import Store
from meshwright.base.store.posix import PosixCalls
from meshwright.core.recover.hosts.election import LeaseView
from meshwright.errors import BusyError, CheckpointError, ConfigError

BEAT_INTERVAL = 1.0
REMOTE_CHECK_SECONDS = 5.0
"""Seconds between two questions to an object store whether the lease is still there."""
OBSERVATION_SECONDS = 6.0
"""How long the beat counter of a holder on another host is observed before the holder counts as dead."""
OBJECT_STORE_OBSERVATION = 20.0
"""The same for a run in an object store, where a request may take seconds."""
START_SECONDS = 30.0
"""How long a job waits for another one that starts beside it."""


Holder = tuple[int, Any]
"""The attempt and the token of a lease."""


@dataclass
class Lease:
    """The exclusive right to write to a run folder, for one attempt."""

    folder: RunFolder
    attempt: int
    restart: int = 0
    """How many attempts of the same job came before."""
    job: str = ""
    """The job that the attempt belongs to, if several hosts share it; a job on one host is its process."""
    address: str = ""
    """Where the supervisors of other hosts reach this one, `HOST:PORT`."""
    next_check: float = 0.0
    """Until when `raise_if_lost` asks the store no more (monotonic clock)."""

    @contextmanager
    def keep_alive(self, on_lost: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Advances the beat counter for other hosts, and calls `on_lost` once if the lease is gone. A thread does it:
        the lease states that this process runs, not that training makes progress.
        """
        done = threading.Event()

        def beat() -> None:
            for beats in count():
                if self.is_lost:
                    on_lost()
                    return
                with suppress(OSError):  # saving a checkpoint reports a full disk
                    write_beat(self.folder, self.attempt, beats)
                if done.wait(BEAT_INTERVAL):
                    return

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @property
    def is_lost(self) -> bool:
        """Whether the lease is gone, or one of another process is in its place: the run folder was deleted or moved."""
        store = open_run_store(self.folder)
        try:
            if store.size(f"attempts/{self.attempt:04d}/{LEASE_FILE}") is None:
                return True
            lease = read_lease(store, self.attempt)
        except OSError as error:
            return error.errno == errno.ESTALE
        return lease is not None and lease.get("token") != process_token()

    def raise_if_lost(self) -> None:
        """Raises a CheckpointError if the run folder was deleted or moved; nothing creates it again. Raises a BusyError
        if another host has taken over the run meanwhile, because the beat counter of this one stood still.
        """
        now = time.monotonic()
        if now < self.next_check:
            return
        if self.folder.url:
            self.next_check = now + REMOTE_CHECK_SECONDS
        store, newest = open_run_store(self.folder), 0
        with suppress(OSError):  # storage that does not answer is no evidence
            newest = read_fence(store).attempt
        if newest > self.attempt:
            holder = read_lease(store, newest) or {}
            raise BusyError(
                f"attempt {newest} on {holder.get('host')} has taken over the run from attempt {self.attempt}",
                "try `meshwright watch` to follow it",
            )
        if self.is_lost:
            raise CheckpointError(
                f"run folder {self.folder.root} was deleted, moved or replaced while attempt {self.attempt} used it",
                "try to put it back and to repeat the command, which resumes from its newest checkpoint",
            )


def acquire_lease(folder: RunFolder, observe: float = OBSERVATION_SECONDS, *, fresh: bool = False) -> Lease:
    """Acquires the lease of the next attempt of a job, and creates the run folder if it does not exist.

    With `fresh`, an existing run is set aside first. This process then holds the lease of the old folder until it holds
    that of the new one, so that no other job can start in between.

    Raises:
        BusyError: another live process holds the run.
        ConfigError: the folder cannot be written, or it has other files and no run.
    """
    try:
        folder.root.parent.mkdir(parents=True, exist_ok=True)
        folder.require_usable()
        dead = raise_if_held(folder, observe)  # before other jobs of this run wait for the lock
        with exclusive_start(folder):
            folder.require_usable()
            if fresh and folder.has_run:
                old = publish_lease(folder, observe, dead)
                aside = folder.set_aside()
                Incident(old.attempt, "stopped", message="--fresh has set the run aside").write(aside)
            folder.root.mkdir(exist_ok=True)
            PosixCalls().sync_folder(str(folder.root.resolve().parent))
            return publish_lease(folder, observe, dead)
    except OSError as error:
        raise ConfigError(
            f"cannot create the run folder {folder.root}: {error.strerror}", "try --run DIR with a writable folder"
        ) from None


def acquire_next_lease(lease: Lease, observe: float = OBSERVATION_SECONDS) -> Lease:
    """Acquires the lease of the next attempt of the same job, in the folder of the previous one."""
    lease.raise_if_lost()
    with exclusive_start(lease.folder):
        lease.raise_if_lost()  # another job may have set the run aside while this one waited
        return publish_lease(lease.folder, observe, following=lease)


@contextmanager
def exclusive_start(folder: RunFolder) -> Iterator[None]:
    """Lets one job at a time start in this folder, so that none finds the name free while `fresh` renames the folder.

    The lease alone decides who holds a run. Where the lock file cannot be created, beside a folder that this user
    cannot rename either, and on file systems without locks, this lock only is missing.
    """
    root = folder.root.resolve()
    path = root.parent / f".{root.name}.lock"
    deadline = time.monotonic() + START_SECONDS
    while (lock := open_lock(path)) is not None and not (try_lock(lock) and is_file_at(path, lock)):
        os.close(lock)
        if time.monotonic() > deadline:
            raise BusyError(
                f"another job has been starting in {folder.root} for {START_SECONDS:g} s",
                "try to continue or end it: it may be a stopped process",
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink()
            os.close(lock)


def open_lock(path: Path) -> int | None:
    """Opens a lock file, which no other user can open and lock; None if it cannot be created."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return None


def is_file_at(path: Path, file: int) -> bool:
    """Whether an open file is still the one at a path; the job that held the lock has deleted it."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def try_lock(file: int) -> bool:
    """Locks an open file; False while another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no such locks
        return True
    return True


def publish_lease(
    folder: RunFolder, observe: float, dead: Holder | None = None, following: Lease | None = None
) -> Lease:
    """Publishes the lease of the next attempt; raises BusyError if another live process than the holder that was found
    dead holds the run. `following` is the lease of the attempt before, if it belongs to the same job.
    """
    store = open_run_store(folder)
    restart, job, address = (following.restart + 1, following.job, following.address) if following else (0, "", "")
    while True:
        raise_if_held(folder, observe, dead)
        lease = Lease(folder, newest_attempt(store) + 1, restart, job, address)
        if publish_if_free(lease, store):
            return lease


def publish_if_free(lease: Lease, store: Store) -> bool:
    """Publishes a lease unless its attempt has one."""
    if lease.attempt > MAX_ATTEMPT:
        raise ConfigError(
            f"run folder {lease.folder.root} has an attempt {MAX_ATTEMPT}, the largest number",
            "try another --run DIR, or remove the attempt or the checkpoint of that number",
        )
    values = {
        **process_identity(),
        "attempt": lease.attempt,
        "restart": lease.restart,
        "job": lease.job,
        "address": lease.address,
        # A manifest that cannot be read right now is listed by name only; names are never reused.
        "inherited": {e.name: e.manifest.digest if e.manifest is not None else "" for e in list_published(store)},
    }
    content = json.dumps(values | {"digest": canonical_digest(values)}, indent=1).encode() + b"\n"
    try:
        return store.publish_if_absent(f"attempts/{lease.attempt:04d}/{LEASE_FILE}", content)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run folder {lease.folder.root}: {error.strerror}",
            "try --run DIR with a writable folder",
        ) from None


def view_newest_lease(folder: RunFolder) -> LeaseView | None:
    """What the supervisor of a host sees of the newest lease."""
    store = open_run_store(folder)
    for attempt, lease in list_leases(store)[:1]:
        outcome, exit_code, final = "", 0, False
        if (incident := read_incident(folder, attempt)) is not None:
            outcome, exit_code, final = incident.outcome, incident.job_exit_code, incident.ends_job
        beats = read_beat(folder, attempt)
        token, job, address = (str(lease.get(name, "")) for name in ("token", "job", "address"))
        return LeaseView(attempt, token, job, address, beats, outcome, exit_code, final)
    return None


def take_lease(folder: RunFolder, after: LeaseView | None, job: str, address: str, fresh: bool) -> Lease | None:
    """Publishes the lease of the attempt after the one that was seen, for a job of several hosts; None if another host
    was faster. With `fresh`, the first lease of a job sets an existing run aside.
    """
    folder.root.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_start(folder):
        folder.require_usable()
        store = open_run_store(folder)
        seen = view_newest_lease(folder)
        if (seen and (seen.attempt, seen.token)) != (after and (after.attempt, after.token)):
            return None  # with --fresh, another host may have begun a new run with the same number
        own_job = seen is not None and seen.job == job
        if fresh and folder.has_run and not own_job:
            old = publish_lease(folder, 0, (after.attempt, after.token) if after else None)
            Incident(old.attempt, "stopped", message="--fresh has set the run aside").write(folder.set_aside())
        folder.root.mkdir(exist_ok=True)
        before = list_leases(store)[:1] if own_job else []
        restart = int(before[0][1].get("restart", 0)) + 1 if before else 0
        lease = Lease(folder, newest_attempt(store) + 1, restart, job, address)
        return lease if publish_if_free(lease, store) else None


def newest_attempt(store: Store) -> int:
    """The newest attempt whose number has been used: its folder has a lease, damaged or not, or any other file."""
    used = [
        n
        for n in list_attempts(store)
        if any(not name.startswith(".") for name in store.list_names(f"attempts/{n:04d}"))
    ]
    saved = [entry.attempt for entry in list_checkpoint_folders(store)]  # the attempt's own folder may be gone
    return max([*used, *saved], default=0)


def raise_if_held(folder: RunFolder, observe: float = OBSERVATION_SECONDS, dead: Holder | None = None) -> Holder | None:
    """Raises BusyError if another live process than the holder that was found dead holds the newest lease; returns the
    holder if it is dead by now.
    """
    for attempt, lease in list_leases(open_run_store(folder))[:1]:
        holder = (attempt, lease.get("token"))
        if has_ended(folder, attempt) or holder in (dead, (attempt, process_token())):
            return dead  # the attempt has ended, or belongs to this process
        if holder_is_alive(lease, folder, attempt, observe):
            raise BusyError(
                f"run folder {folder.root} is held by process {lease['pid']} on {lease.get('host')} since "
                f"{lease.get('since')} (attempt {attempt})",
                "try again when it has ended, stop it, or use another --run DIR",
            )
        return holder
    return None


TOKEN = secrets.token_hex(8)
HOST_NAME_VARIABLE = "MESHWRIGHT_HOST_NAME"


def host_name() -> str:
    """The name of this host in records: what its engine calls it, or its own."""
    return os.environ.get(HOST_NAME_VARIABLE) or socket.gethostname()


def process_token() -> str:
    """Identifies this process while it runs; a forked process has another token."""
    return f"{TOKEN}-{os.getpid()}"


def process_identity() -> dict[str, Any]:
    """What a lease records about its holder."""
    return {
        "host": host_name(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "boot": read_text("/proc/sys/kernel/random/boot_id"),
        "namespace": pid_namespace(),
        "token": process_token(),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),  # for people; no decision reads it
    }


def holder_is_alive(lease: dict[str, Any], folder: RunFolder, attempt: int, observe: float) -> bool:
    """Whether the holder's process runs (same host) or its beat counter advances (another host)."""
    observe = max(observe, OBJECT_STORE_OBSERVATION) if observe and folder.url else observe
    this = process_identity()
    # Hosts of a job may share a kernel, as containers do: then their names differ.
    this_host = (lease.get("boot"), lease.get("namespace"), lease.get("host", this["host"]))
    if this["boot"] and this_host == (this["boot"], this["namespace"], this["host"]):
        return bool(lease.get("started")) and process_start(int(lease.get("pid", 0))) == lease["started"]
    before, end = progress_counters(folder, attempt), time.monotonic() + observe
    while time.monotonic() < end:
        time.sleep(min(0.25, observe))
        if progress_counters(folder, attempt) != before:
            return True
    return False


def progress_counters(folder: RunFolder, attempt: int) -> list[Any]:
    """The lease's beat counter and the ranks' heartbeat counters of an attempt."""
    heartbeats = [read_heartbeat(path) for path in sorted(folder.attempt(attempt).glob("heartbeat-*"))]
    return [read_beat(folder, attempt), *(heartbeat.beats if heartbeat else 0 for heartbeat in heartbeats)]


def pid_namespace() -> str:
    """The pid namespace of this process: two containers may use the same pid for different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
