"""Memory thrash: pages that are read back from disk, or a CUDA allocator that frees and retries. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, timed_steps

MAJOR_FAULT_SECONDS = 1e-4
"""Assumed seconds of a major page fault: one read of a solid-state disk."""
RETRY_SECONDS = 5e-3
"""Assumed seconds of a retry: the allocator synchronizes the device and frees its cached blocks."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None:
        return
    costs = {"major_faults": MAJOR_FAULT_SECONDS, "alloc_retries": RETRY_SECONDS}
    tables = {rank: history.steps(rank).of_attempt(steps.attempt).timed() for rank in steps.ranks}
    for name, seconds in costs.items():
        counts = {rank: np.nan_to_num(table.column(name)) for rank, table in tables.items()}
        rank = max(counts, key=lambda rank: float(counts[rank].mean()))  # the others wait for it
        share = float(counts[rank].mean() * seconds / steps.duration)
        if share >= LIMITING_SHARE and np.median(counts[rank]) > 0:
            yield describe(rank, name, float(counts[rank].mean()), share, steps.config.activation_checkpoint.mode)


def describe(rank: int, name: str, count: float, share: float, activation_checkpoint: str) -> Finding:
    swaps = name == "major_faults"
    settings = ('activation_checkpoint.mode = "full"',) if activation_checkpoint != "full" else ()
    what = "pages are read back from disk" if swaps else "CUDA memory is freed and allocated again"
    unit = "major page faults" if swaps else "retries of the CUDA allocator"
    return Finding(
        "memory",
        "swapping" if swaps else "allocator retries",
        f"rank {rank}: {what} in every step ({count:.0f} {unit} per step): memory is too small",
        min(share, 1.0),
        "medium",
        rank=rank,
        evidence=(MeasuredFigure(f"{unit} per step, rank {rank}", count, "count", 0.0, "enough memory"),),
        change=Change(
            settings, "use smaller micro-batches (batch.micro), shard more (layout.shard), or fewer ranks per host"
        ),
        check="meshwright diagnose RUN --try" if settings else "meshwright report RUN",
    )
