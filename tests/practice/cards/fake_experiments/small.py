"""Experiments that end in milliseconds, each in its own way."""

from __future__ import annotations

import os
import signal
import time

from meshwright_practice.cards.card import Observation
from meshwright_practice.pictures import Bars, Curves, GanttChart, HeatMap, Span


def observe(**values: float) -> Observation:
    bars = Bars("Values", "", tuple(values), {"value": tuple(values.values())})
    return Observation(values, bars, ("A note about this run.",))


def double(knobs):
    print("printed by an experiment")
    return observe(size=float(knobs["size"]), doubled=2.0 * knobs["size"])


def ranks_sum(knobs):
    """A collective on two ranks, and a value that a child's own process computed."""
    import torch

    from meshwright.testing import run_ranks

    sums = run_ranks(lambda world: float(world.all_reduce(torch.ones(())).wait()), 2, timeout=60)
    return observe(sum=sums[0], ranks=2.0)


def hang(knobs):
    time.sleep(600)


def hang_with_ranks(knobs):
    from meshwright.testing import run_ranks

    run_ranks(lambda world: time.sleep(600), 2, timeout=600)


def crash(knobs):
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(knobs):
    print("before the failure")
    raise ValueError("the experiment\nis broken")


def use_memory(knobs):
    kept = [bytearray(64 << 20) for _ in range(6)]
    for block in kept:
        block[::4096] = b"x" * len(block[::4096])
    time.sleep(600)


def use_memory_in_child(knobs):
    if os.fork() == 0:
        use_memory(knobs)
    time.sleep(600)


def leave_files(knobs):
    import tempfile

    path = tempfile.mkdtemp()
    return observe(inside=float(path.startswith(os.environ["TMPDIR"])), pid=float(os.getpid()))


PICTURES = {
    "bars": Bars("Memory by class", "bytes", ("DDP", "FSDP"), {"parameters": (4e6, 1e6), "gradients": (4e6, 1e6)}),
    "timeline": GanttChart(
        "GPipe",
        "ticks",
        tuple(
            Span(f"rank {rank}", f"{name}{micro}", float(begin + micro), float(begin + micro + 1))
            for rank in range(4)
            for micro in range(4)
            for name, begin in (("F", rank), ("B", 10 - rank))
        ),
    ),
    "heat map": HeatMap(
        "Load",
        "tokens",
        tuple(f"expert {row}" for row in range(4)),
        tuple(f"step {column}" for column in range(8)),
        tuple(tuple(float((7 * row * column) % 40) for column in range(8)) for row in range(4)),
    ),
    "curves": Curves(
        "Loss",
        "step",
        "nats",
        tuple(map(float, range(12))),
        {"one process": tuple(4.0 / (step + 1) for step in range(12)), "four ranks": (3.0,) * 12},
    ),
}


def picture(knobs):
    return Observation({"doubled": 16.0, "size": 8.0}, PICTURES[knobs["picture"]])


def slow(knobs):
    time.sleep(0.7)
    return observe(size=8.0, doubled=16.0)
