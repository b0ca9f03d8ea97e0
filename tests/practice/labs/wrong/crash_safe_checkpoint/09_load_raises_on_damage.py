"""Sees the damage and raises, instead of using the checkpoint before. Expected check: torn file."""
# ruff: noqa: F401

import hashlib

from meshwright_practice.labs.crash_safe_checkpoint.solution import save


def load(folder):
    steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt")]
    if not steps:
        return None
    content = (folder / f"step-{max(steps)}.ckpt").read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ValueError("the checkpoint is damaged")
    return max(steps), content[32:]
