"""Measures the run folder of a host: free space, write rate, and whether all hosts see the same folder. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meshwright.base.checkpoint.listing import open_run_store
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.interface import Store
from meshwright.core.faults import fail_point
from meshwright.errors import MeshwrightError
from meshwright.ops.preflight.measurements import DiskMeasurement

WRITE_BYTES = 64 << 20
"""Largest file that is written to measure the rate."""
BLOCK_BYTES = 4 << 20
"""Bytes that are written at once; the time is checked after each block."""
SHARED_NAME = "hosts"
"""The file that one host publishes and every host reads."""
REMOVE_TRIES = 3
"""How often a host tries to remove what was written."""
MAX_ID_BYTES = 1024
"""Limit of that file's size."""


def measure_disk(
    root: Path, token: str, host: str, number: int, wait_for_hosts: Callable[[], object], seconds: float
) -> DiskMeasurement:
    """Measures the run folder. The first rank of every host calls it; `number` is that of the host.

    Every host publishes one file under the same name, and exactly one host succeeds. A host that then reads another
    content than the others has another folder. What is written is in a folder named for `token`, and is removed.
    """
    folder = f".preflight-{token}"
    created = [path for path in (root, *root.parents) if not path.exists()]
    wait_for_hosts()  # before the first host creates the folder
    store: Store | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        store = open_run_store(RunFolder(root))
        measured = write_files(store, folder, f"{token} {host}", number, seconds)
    except (OSError, MeshwrightError) as error:
        measured = DiskMeasurement(str(root), error=reason(error))
    wait_for_hosts()
    if store is not None and not measured.error:
        try:
            content = store.read(f"{folder}/{SHARED_NAME}", 0, MAX_ID_BYTES).decode(errors="replace")
            measured = replace(measured, folder_id=content, free_bytes=free_bytes(root))
        except (OSError, MeshwrightError) as error:
            measured = replace(measured, error=f"a published file cannot be read: {reason(error)}")
    wait_for_hosts()  # before the first host removes the folder
    if store is not None and (measured.won or measured.error):
        remove_files(store, folder)
        with suppress(OSError):  # another host has removed it, or something else is in it
            for path in created:
                path.rmdir()
    return replace(measured, folder=str(root))


def remove_files(store: Store, folder: str) -> None:
    """Removes the folder and its files. A host that failed removes its own files at the same time."""
    for _ in range(REMOVE_TRIES):
        with suppress(OSError):
            store.remove_folder(folder)
            return


def reason(error: OSError | MeshwrightError) -> str:
    return error.message if isinstance(error, MeshwrightError) else error.strerror or str(error)


def write_files(store: Store, folder: str, content: str, number: int, seconds: float) -> DiskMeasurement:
    """Writes a file for the rate, publishes one file twice, and the shared file once."""
    rate = write_rate(store, f"{folder}/write-{number}", seconds)
    name = f"{folder}/once-{number}"
    once = store.publish_if_absent(name, b"first") and not store.publish_if_absent(name, b"second")
    once = once and store.read(name, 0, MAX_ID_BYTES) == b"first"
    won = store.publish_if_absent(f"{folder}/{SHARED_NAME}", content.encode()[:MAX_ID_BYTES])
    return DiskMeasurement("", write_rate=rate, publishes_once=once, won=won)


def write_rate(store: Store, name: str, seconds: float) -> float:
    """Returns the bytes/s of a file that is written for so many seconds at most, then synced."""
    block, written = os.urandom(BLOCK_BYTES), 0
    sink = store.create(name)
    start = time.perf_counter()
    try:
        while written < WRITE_BYTES and (not written or time.perf_counter() - start < seconds):
            fail_point("preflight.write", 0)
            sink.write(block)
            written += len(block)
        sink.close()
    except BaseException:
        sink.abort()
        raise
    elapsed = time.perf_counter() - start
    with suppress(OSError):
        store.remove(name)
    return written / max(1e-9, elapsed)


def free_bytes(root: Path) -> int | None:
    """Returns the bytes that an ordinary user can write."""
    try:
        usage = os.statvfs(root)
    except OSError:
        return None
    return usage.f_frsize * usage.f_bavail
