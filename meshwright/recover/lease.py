"""One writer a run: whoever trains holds the newest attempt's lease. Torch-free.

An attempt's number is a fencing epoch, taken by publishing `attempts/NNNN/lease.json` if it is absent. A holder is
alive while its process lives (same host, same boot, same process, not merely the same number) or, seen from another
host, while its beat moves. No clock of another machine is read, and no wall clock at all.
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
"""Seconds that the beat of a holder on another host is watched before it counts as dead."""


@dataclass
class Lease:
    """The right to write to a run folder, for one attempt."""

    folder: RunFolder
    attempt: int

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Signs of life for other hosts, from a thread: a lease says that its process lives, no more."""
        over = threading.Event()

        def beat() -> None:
            for beats in count():
                with suppress(OSError):  # a full disk is the save's to report
                    (self.folder.attempt(self.attempt) / "beat").write_text(str(beats))
                if over.wait(BEAT_INTERVAL):
                    return

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def acquire_lease(folder: RunFolder, observe: float = OBSERVATION_SECONDS) -> Lease:
    """The next attempt's lease, or BusyError naming who holds the run."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run folder {folder.root} cannot be made: {error.strerror}",
            "allowed: --run DIR, a folder that can be written",
        ) from None
    store = open_run_store(folder)
    PosixCalls().sync_folder(str(folder.root.resolve().parent))
    while True:
        raise_if_held(folder, observe)
        attempt = newest_attempt(store) + 1
        values = {
            **process_identity(),
            "attempt": attempt,
            # By name alone where one cannot be read just now: names are never used twice.
            "inherited": {e.name: e.manifest.digest if e.manifest is not None else "" for e in list_published(store)},
        }
        content = json.dumps(values | {"digest": canonical_digest(values)}, indent=1).encode() + b"\n"
        try:
            if store.publish_if_absent(f"attempts/{attempt:04d}/{LEASE_FILE}", content):
                return Lease(folder, attempt)
        except OSError as error:
            raise ConfigError(
                f"run folder {folder.root} cannot be written: {error.strerror}",
                "allowed: --run DIR, a folder that can be written",
            ) from None


def newest_attempt(store: Store) -> int:
    """The newest attempt that has a lease, readable or not: a damaged one has been taken all the same."""
    taken = [n for n in list_attempts(store) if store.size(f"attempts/{n:04d}/{LEASE_FILE}") is not None]
    wrote = [entry.attempt for entry in list_checkpoint_folders(store)]  # also where the attempts' own folders are gone
    return max([*taken, *wrote], default=0)


def raise_if_held(folder: RunFolder, observe: float = OBSERVATION_SECONDS) -> None:
    for attempt, lease in list_leases(open_run_store(folder))[:1]:
        if folder.incident(attempt).exists():
            return  # ended, and said so
        if lease.get("token") != process_token() and holder_is_alive(lease, folder.attempt(attempt), observe):
            raise BusyError(
                f"run folder {folder.root} is held by process {lease['pid']} on {lease['host']} since {lease['since']} "
                f"(attempt {attempt})",
                "wait for it, end it, or give another --run DIR",
            )


TOKEN = secrets.token_hex(8)


def process_token() -> str:
    """This process, for as long as it lives; a fork is another."""
    return f"{TOKEN}-{os.getpid()}"


def process_identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "boot": read_text("/proc/sys/kernel/random/boot_id"),
        "namespace": pid_namespace(),
        "token": process_token(),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),  # for people; nothing reads it
    }


def holder_is_alive(lease: dict[str, Any], attempt: Path, observe: float) -> bool:
    here = process_identity()
    if here["boot"] and (lease.get("boot"), lease.get("namespace")) == (here["boot"], here["namespace"]):
        return bool(lease.get("started")) and process_start(int(lease.get("pid", 0))) == lease["started"]
    before, end = progress_counters(attempt), time.monotonic() + observe
    while time.monotonic() < end:
        time.sleep(min(0.25, observe))
        if progress_counters(attempt) != before:
            return True
    return False


def progress_counters(attempt: Path) -> list[Any]:
    """Everything in an attempt's folder that moves while it lives."""
    beat = read_text(str(attempt / "beat"))
    return [
        beat,
        *((page.beats if (page := read_heartbeat(path)) else 0) for path in sorted(attempt.glob("heartbeat-*"))),
    ]


def read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(256).strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Processes are numbered anew in every container: a pid means something within one such namespace alone."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
