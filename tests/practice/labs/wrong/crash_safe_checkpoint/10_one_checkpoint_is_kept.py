"""Deletes the checkpoint before as soon as the new one is written. Expected check: flipped bit."""
# ruff: noqa: F401

from meshwright_practice.labs.crash_safe_checkpoint.solution import load
from meshwright_practice.labs.crash_safe_checkpoint.solution import save as save_file


def save(folder, step, payload):
    save_file(folder, step, payload)
    for path in folder.glob("step-*.ckpt"):
        if path.name != f"step-{step}.ckpt":
            path.unlink()
