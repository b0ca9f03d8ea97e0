"""Waits inside collectives are measured per phase, on the training thread only."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.core.parallel.world import World
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import tree_leaves
from meshwright.core.trainer.records.step_recorder import local_seconds
from meshwright.testing import run_ranks

SLEEP = 0.2


def wait_in_each_phase(world: World) -> dict[str, dict[str, float]]:
    """Rank 1 is late in forward, in a collective of c10d; and in backward, in a functional collective."""
    from torch.distributed._functional_collectives import all_reduce

    clock = StepClock(world.device)
    for phase in ("forward", "backward"):
        clock.enter(phase)
        if world.rank == 1:
            time.sleep(SLEEP)
        if phase == "forward":
            dist.all_reduce(torch.ones(3))
        else:
            tree_leaves(all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1)
    clock.enter("sync")
    world.all_reduce(torch.ones(1)).wait()
    clock.close()
    dist.all_reduce(torch.ones(3))  # no step runs: not measured
    return {"waits": clock.waits.seconds(), "phases": clock.seconds()}


def test_waits_of_collectives_are_measured_in_the_phase_in_which_a_rank_waits() -> None:
    first, late = run_ranks(wait_in_each_phase, 2)
    assert set(first["waits"]) == set(late["waits"]) == {"forward", "backward"}  # `sync` is a wait as a whole
    for phase in ("forward", "backward"):
        assert SLEEP / 2 < first["waits"][phase] <= first["phases"][phase]
        assert local_seconds(**first)[phase] < local_seconds(**late)[phase]


def test_waits_of_other_threads_are_not_measured() -> None:
    def wait_in_thread(world: World) -> dict[str, float]:
        clock = StepClock(world.device)
        clock.enter("forward")
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
        thread.start()
        thread.join()
        clock.close()
        return clock.waits.seconds()

    assert run_ranks(wait_in_thread, 2) == [{}, {}]


def test_local_seconds_move_waits_to_sync() -> None:
    local = local_seconds({"forward": 3.0, "sync": 1.0, "update": 1.0}, {"forward": 2.0})
    assert local == pytest.approx({"forward": 1.0, "sync": 3.0, "update": 1.0})
