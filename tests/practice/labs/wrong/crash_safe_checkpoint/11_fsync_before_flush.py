"""Calls fsync while the end of the payload is in Python's buffer. Expected check: durable after return."""
# ruff: noqa: F401

import hashlib
import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import load, sync_folder


def save(folder, step, payload):
    temporary = folder / f".{step}.tmp"
    with open(temporary, "wb", buffering=1 << 20) as file:
        file.write(hashlib.sha256(payload).digest() + payload)
        os.fsync(file.fileno())
    os.replace(temporary, folder / f"step-{step}.ckpt")
    sync_folder(folder)
