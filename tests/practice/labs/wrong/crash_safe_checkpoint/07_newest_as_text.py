"""Sorts names as text, where step 9 comes after step 10. Expected check: newest."""
# ruff: noqa: F401

import hashlib

from meshwright_practice.labs.crash_safe_checkpoint.solution import save


def load(folder):
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return int(path.stem.removeprefix("step-")), content[32:]
    return None
