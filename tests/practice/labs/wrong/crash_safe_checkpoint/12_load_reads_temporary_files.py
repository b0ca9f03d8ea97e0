"""Gives the temporary file a name that load takes for a checkpoint. Expected check: kill."""

import hashlib
import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import sync_folder


def save(folder, step, payload):
    temporary = folder / f"step-{step}.ckpt.tmp"
    with open(temporary, "wb") as file:
        file.write(hashlib.sha256(payload).digest() + payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / f"step-{step}.ckpt")
    sync_folder(folder)


def load(folder):
    newest = max(folder.glob("step-*"), key=lambda path: int(path.name.split("-")[1].split(".")[0]), default=None)
    if newest is None:
        return None
    return int(newest.stem.removeprefix("step-")), newest.read_bytes()[32:]
