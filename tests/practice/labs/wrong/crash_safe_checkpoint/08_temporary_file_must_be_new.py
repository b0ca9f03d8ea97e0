"""Refuses to save where a crash has left a temporary file. Expected check: save after a crash."""
# ruff: noqa: F401

import hashlib
import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import load, sync_folder


def save(folder, step, payload):
    with open(folder / "new.tmp", "xb") as file:
        file.write(hashlib.sha256(payload).digest() + payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "new.tmp", folder / f"step-{step}.ckpt")
    sync_folder(folder)
