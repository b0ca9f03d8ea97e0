"""Writes one file in place, over the checkpoint before. Expected check: kill."""

import hashlib
import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import sync_folder


def save(folder, step, payload):
    with open(folder / "checkpoint", "wb") as file:
        file.write(step.to_bytes(8, "big") + hashlib.sha256(payload).digest() + payload)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def load(folder):
    if not (folder / "checkpoint").exists():
        return None
    content = (folder / "checkpoint").read_bytes()
    if hashlib.sha256(content[40:]).digest() != content[8:40]:
        return None
    return int.from_bytes(content[:8], "big"), content[40:]
