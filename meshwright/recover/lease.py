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
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.catalogue import LEASE, leases, published, store_of
from meshwright.checkpoint.manifest import digest_of
from meshwright.checkpoint.store import Store
from meshwright.errors import BusyError, ConfigError
from meshwright.record.folder import RunFolder
from meshwright.record.page import process_start, read_page

BEAT_EVERY = 1.0
OBSERVE = 6.0
"""Seconds that the beat of a holder on another host is watched before it counts as dead."""


@dataclass
class Lease:
    """The right to write to a run folder, for one attempt."""

    folder: RunFolder
    attempt: int
    beats: int = 0
    beaten: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """A sign of life for other hosts; at most one a second is written."""
        now = time.monotonic()
        if now - self.beaten >= BEAT_EVERY:
            self.beaten, self.beats = now, self.beats + 1
            with suppress(OSError):  # a full disk is the save's to report
                (self.folder.attempt(self.attempt) / "beat").write_text(str(self.beats))


def take(folder: RunFolder, observe: float = OBSERVE) -> Lease:
    """The next attempt's lease, or BusyError naming who holds the run."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run folder {folder.root} cannot be made: {error.strerror}",
            "allowed: --run DIR, a folder that can be written",
        ) from None
    store = store_of(folder)
    while True:
        refuse_while_held(folder, observe)
        attempt = newest_attempt(store) + 1
        values = {
            **this_process(),
            "attempt": attempt,
            "inherited": {e.name: e.manifest.digest for e in published(store) if e.manifest is not None},
        }
        content = json.dumps(values | {"digest": digest_of(values)}, indent=1).encode() + b"\n"
        try:
            if store.publish_if_absent(f"attempts/{attempt:04d}/{LEASE}", content):
                return Lease(folder, attempt)
        except OSError as error:
            raise ConfigError(
                f"run folder {folder.root} cannot be written: {error.strerror}",
                "allowed: --run DIR, a folder that can be written",
            ) from None


def newest_attempt(store: Store) -> int:
    """The newest attempt that has a lease, readable or not: a damaged one has been taken all the same."""
    numbers = [int(name) for name in store.names("attempts") if name.isdigit()]
    return max((n for n in numbers if store.size(f"attempts/{n:04d}/{LEASE}") is not None), default=0)


def refuse_while_held(folder: RunFolder, observe: float = OBSERVE) -> None:
    for attempt, lease in leases(store_of(folder))[:1]:
        if folder.incident(attempt).exists():
            return  # ended, and said so
        if lease.get("token") != TOKEN and alive(lease, folder.attempt(attempt), observe):
            raise BusyError(
                f"run folder {folder.root} is held by process {lease['pid']} on {lease['host']} since {lease['since']} "
                f"(attempt {attempt})",
                "wait for it, end it, or give another --run DIR",
            )


TOKEN = secrets.token_hex(8)
"""This process, for as long as it lives."""


def this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "boot": read_first("/proc/sys/kernel/random/boot_id"),
        "namespace": namespace(),
        "token": TOKEN,
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),  # for people; nothing reads it
    }


def alive(lease: dict[str, Any], attempt: Path, observe: float) -> bool:
    here = this_process()
    if here["boot"] and (lease.get("boot"), lease.get("namespace")) == (here["boot"], here["namespace"]):
        return bool(lease.get("started")) and process_start(int(lease.get("pid", 0))) == lease["started"]
    before, end = signs(attempt), time.monotonic() + observe
    while time.monotonic() < end:
        time.sleep(min(0.25, observe))
        if signs(attempt) != before:
            return True
    return False


def signs(attempt: Path) -> list[Any]:
    """Everything in an attempt's folder that moves while it lives."""
    beat = read_first(str(attempt / "beat"))
    return [beat, *((page.beats if (page := read_page(path)) else 0) for path in sorted(attempt.glob("page-*")))]


def read_first(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(256).strip()
    except OSError:
        return ""


def namespace() -> str:
    """Processes are numbered anew in every container: a pid means something within one such namespace alone."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
