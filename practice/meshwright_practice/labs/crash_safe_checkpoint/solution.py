"""Lab: a checkpoint that survives a crash at any time. The reference solution."""

import hashlib
import os
from pathlib import Path

DIGEST_BYTES = 32


def save(folder: Path, step: int, payload: bytes) -> None:
    """Data first, then the name, and each of them synced before the next."""
    temporary = folder / f".{step}.tmp"  # a crash may leave it; the next save of this step replaces it
    with open(temporary, "wb") as file:
        file.write(hashlib.sha256(payload).digest() + payload)
        file.flush()  # from Python's buffer to the kernel,
        os.fsync(file.fileno())  # and from the kernel to the disk
    os.replace(temporary, folder / f"step-{step}.ckpt")
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """A name is data of the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(folder: Path) -> tuple[int, bytes] | None:
    """The newest checkpoint whose digest fits."""
    steps = sorted((int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt")), reverse=True)
    for step in steps:
        content = (folder / f"step-{step}.ckpt").read_bytes()
        digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() == digest:
            return step, payload
    return None
