"""Renames without an fsync, so that the data may be lost with the power. Expected check: durable after return."""
# ruff: noqa: F401

import hashlib
import os

from meshwright_practice.labs.crash_safe_checkpoint.solution import load


def save(folder, step, payload):
    temporary = folder / f".{step}.tmp"
    temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
    os.replace(temporary, folder / f"step-{step}.ckpt")
