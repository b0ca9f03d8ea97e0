"""Stores the payload without a digest, so that load cannot see damage. Expected check: flipped bit."""

import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import sync_folder


def save(folder, step, payload):
    temporary = folder / f".{step}.tmp"
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / f"step-{step}.ckpt")
    sync_folder(folder)


def load(folder):
    steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt")]
    return (max(steps), (folder / f"step-{max(steps)}.ckpt").read_bytes()) if steps else None
