"""Single-writer lease of a run folder: the job that trains holds the lease of the newest attempt. Torch-free.

The attempt number is a fencing epoch, acquired by publishing `attempts/NNNN/lease.json` if it is absent. On the same
host the holder is alive while its process runs (same boot, same pid, same start time). Seen from another host, the
holder is alive while its beat counter advances. No decision reads a wall clock or the clock of another machine.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.checkpoint.listing import (
    LEASE_FILE,
    list_attempts,
    list_checkpoint_folders,
    list_leases,
    list_published,
    open_run_store,
)
from meshwright.checkpoint.manifest import canonical_digest
from meshwright.errors import BusyError, ConfigError
from meshwright.store.interface import Store
from meshwright.store.posix import PosixCalls
from meshwright.telemetry.heartbeat import process_start, read_heartbeat
from meshwright.telemetry.run_folder import RunFolder

BEAT_INTERVAL = 1.0
OBSERVATION_SECONDS = 6.0
"""How long the beat counter of a holder on another host is observed before the holder counts as dead."""


@dataclass
class Lease:
    """The exclusive right to write to a run folder, for one attempt."""

    folder: RunFolder
    attempt: int

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Advances the beat counter for other hosts. A thread does it: the lease states that this process runs, not
        that training makes progress.
        """
        done = threading.Event()

        def beat() -> None:
            for beats in count():
                with suppress(OSError):  # saving a checkpoint reports a full disk
                    (self.folder.attempt(self.attempt) / "beat").write_text(str(beats))
                if done.wait(BEAT_INTERVAL):
                    return

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def acquire_lease(folder: RunFolder, observe: float = OBSERVATION_SECONDS) -> Lease:
    """Acquires the lease of the next attempt; raises BusyError if another live process holds the run."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the run folder {folder.root}: {error.strerror}",
            "try --run DIR with a writable folder",
        ) from None
    store = open_run_store(folder)
    PosixCalls().sync_folder(str(folder.root.resolve().parent))
    while True:
        raise_if_held(folder, observe)
        attempt = newest_attempt(store) + 1
        values = {
            **process_identity(),
            "attempt": attempt,
            # A manifest that cannot be read right now is listed by name only; names are never reused.
            "inherited": {e.name: e.manifest.digest if e.manifest is not None else "" for e in list_published(store)},
        }
        content = json.dumps(values | {"digest": canonical_digest(values)}, indent=1).encode() + b"\n"
        try:
            if store.publish_if_absent(f"attempts/{attempt:04d}/{LEASE_FILE}", content):
                return Lease(folder, attempt)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run folder {folder.root}: {error.strerror}",
                "try --run DIR with a writable folder",
            ) from None


def newest_attempt(store: Store) -> int:
    """The newest attempt that has a lease. A damaged lease counts too: its attempt number has been used."""
    leased = [n for n in list_attempts(store) if store.size(f"attempts/{n:04d}/{LEASE_FILE}") is not None]
    saved = [entry.attempt for entry in list_checkpoint_folders(store)]  # the attempt's own folder may be gone
    return max([*leased, *saved], default=0)


def raise_if_held(folder: RunFolder, observe: float = OBSERVATION_SECONDS) -> None:
    """Raises BusyError if another live process holds the newest lease."""
    for attempt, lease in list_leases(open_run_store(folder))[:1]:
        if folder.incident(attempt).exists():
            return  # the attempt has ended
        if lease.get("token") != process_token() and holder_is_alive(lease, folder.attempt(attempt), observe):
            raise BusyError(
                f"run folder {folder.root} is held by process {lease['pid']} on {lease['host']} since {lease['since']} "
                f"(attempt {attempt})",
                "try again when it has ended, stop it, or use another --run DIR",
            )


TOKEN = secrets.token_hex(8)


def process_token() -> str:
    """Identifies this process while it runs; a forked process has another token."""
    return f"{TOKEN}-{os.getpid()}"


def process_identity() -> dict[str, Any]:
    """What a lease records about its holder."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "boot": read_text("/proc/sys/kernel/random/boot_id"),
        "namespace": pid_namespace(),
        "token": process_token(),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),  # for people; no decision reads it
    }


def holder_is_alive(lease: dict[str, Any], attempt: Path, observe: float) -> bool:
    """Whether the holder's process runs (same host) or its beat counter advances (another host)."""
    this = process_identity()
    if this["boot"] and (lease.get("boot"), lease.get("namespace")) == (this["boot"], this["namespace"]):
        return bool(lease.get("started")) and process_start(int(lease.get("pid", 0))) == lease["started"]
    before, end = progress_counters(attempt), time.monotonic() + observe
    while time.monotonic() < end:
        time.sleep(min(0.25, observe))
        if progress_counters(attempt) != before:
            return True
    return False


def progress_counters(attempt: Path) -> list[Any]:
    """The lease's beat counter and the ranks' heartbeat counters of an attempt."""
    beat = read_text(str(attempt / "beat"))
    heartbeats = [read_heartbeat(path) for path in sorted(attempt.glob("heartbeat-*"))]
    return [beat, *(heartbeat.beats if heartbeat else 0 for heartbeat in heartbeats)]


def read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(256).strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """The pid namespace of this process: two containers may use the same pid for different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
