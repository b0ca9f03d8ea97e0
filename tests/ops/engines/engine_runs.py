"""A small run for the tests of engines: its run file, the digest of an undisturbed run, and how far a run has come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest

ROOT = Path(__file__).parents[3]
RUN_FILE = """\
steps = {steps}
log_every = 5
[model]
width = 32
layers = 2
ffn = 48
[data]
kind = "synthetic"
sequence = 16
samples = 500
[schedule]
warmup = 2
[eval]
every = 0
[checkpoint]
every = 5
seconds = 0
mode = "sync"
[launch]
device = "cpu"
collective_timeout = 60
"""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_run_file(folder: Path, steps: int = 40, name: str = "small.toml") -> Path:
    file = folder / name
    file.write_text(RUN_FILE.format(steps=steps))
    return file


def train_undisturbed(folder: Path, *options: str, steps: int = 40) -> str:
    """Trains without an engine and returns the digest of the final state."""
    command = [sys.executable, "-m", "meshwright", "train", str(write_run_file(folder, steps)), *options]
    subprocess.run(
        [*command, "--run", str(folder / "undisturbed")], env=os.environ | ENVIRONMENT, check=True, timeout=120
    )
    return final_digest(folder / "undisturbed", steps)


def final_digest(run: Path, steps: int) -> str:
    """The digest of the state after the last step."""
    entry = list_published(open_run_store(RunFolder(run)))[0]
    assert entry.step == steps
    return state_digest(entry)


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, or -1."""
    published = list_published(open_run_store(RunFolder(run)))
    return published[0].step if published else -1
