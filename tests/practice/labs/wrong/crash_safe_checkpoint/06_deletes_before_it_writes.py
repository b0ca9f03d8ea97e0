"""Deletes the old checkpoints to make room for the new one. Expected check: kill."""
# ruff: noqa: F401

from meshwright_practice.labs.crash_safe_checkpoint.solution import load
from meshwright_practice.labs.crash_safe_checkpoint.solution import save as save_file


def save(folder, step, payload):
    for path in folder.glob("step-*.ckpt"):
        path.unlink()
    save_file(folder, step, payload)
