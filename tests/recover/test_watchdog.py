"""Whom the watchdog suspects, and how it comes by a stack."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from meshwright.launch.ranks import FOLDER_PREFIX, remove_stale_folders
from meshwright.parallel.context_parallel.ring_attention import PendingTransfer
from meshwright.recover.watchdog import (
    STRAGGLER_WINDOW,
    Watchdog,
    dump_stack,
    find_collective_mismatch,
    in_collective,
    pick_suspect,
)
from meshwright.telemetry.heartbeat import Heartbeat, read_heartbeat
from meshwright.telemetry.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.attempt(1).mkdir(parents=True)
    return folder


def pages(folder, count):
    return [Heartbeat(folder.heartbeat(1, rank)) for rank in range(count)]


def seen(folder, count):
    return {rank: read_heartbeat(folder.heartbeat(1, rank)) for rank in range(count)}


def test_a_rank_that_waits_is_never_the_suspect(folder):
    waiting, busy, late = pages(folder, 3)
    waiting.enter("sync", 5)
    busy.enter("forward", 5)
    late.enter("fetch", 6)
    late.set_waiting(True)
    assert pick_suspect(seen(folder, 3), [0, 1, 2], {0, 2}) == 1


def test_where_all_wait_the_one_furthest_behind_is_the_suspect(folder):
    for rank, page in enumerate(pages(folder, 3)):
        for _ in range(3 - (rank == 2)):
            page.collective("sum")
        page.enter("sync", 5)
    assert pick_suspect(seen(folder, 3), [0, 1, 2], {0, 1, 2}) == 2


def test_the_first_collective_that_differs_is_found_though_ranks_went_on(folder):
    for rank, page in enumerate(pages(folder, 3)):
        for number in range(10):
            page.collective("stray" if (rank, number) == (1, 6) else f"sum {number}")
    assert (
        "collective 7 is 'stray' on rank 1 and 'sum 6' on rank(s) 0, 2" in find_collective_mismatch(seen(folder, 3))[1]
    )
    assert find_collective_mismatch(seen(folder, 3))[0] == 1


def test_a_slow_rank_is_named_with_the_phase_that_makes_it_slow_and_waiting_is_not_slowness(folder):
    made = pages(folder, 3)
    dog = Watchdog(folder, 1, hang_timeout=100, straggler_ratio=1.5)

    def work(steps):
        for rank, page in enumerate(made):
            for _ in range(steps):
                own = {"fetch": 0.3 if rank == 2 else 0.01, "forward": 0.1, "sync": 0.0 if rank == 2 else 0.29}
                page.complete_step(own)
                page.enter("update", page.completed_steps)

    dog.check()
    work(STRAGGLER_WINDOW)
    assert dog.check()[1] == []  # the first window holds start-up
    work(STRAGGLER_WINDOW)
    (straggler,) = dog.check()[1]
    assert (straggler.rank, straggler.phase) == (2, "fetch")
    assert 3.4 < straggler.factor < 3.8
    assert "rank 2 is slow: 3.6 times the others" in str(straggler)


def test_a_stack_comes_from_py_spy_where_it_is(folder, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "stack of $4"\n')
    spy.chmod(spy.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pages(folder, 1)
    assert dump_stack(seen(folder, 1)[0], tmp_path / "log") == f"stack of {os.getpid()}\n"


def test_a_process_that_has_taken_a_dead_rank_s_number_is_not_touched(folder, tmp_path):
    from dataclasses import replace

    pages(folder, 1)
    stranger = replace(seen(folder, 1)[0], process_started=1)
    assert dump_stack(stranger, tmp_path / "log") == ""


def test_what_a_killed_launch_left_in_the_temporary_folder_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, own = (
        tmp_path / f"{FOLDER_PREFIX}{dead.pid}-12345-abc",
        tmp_path / f"{FOLDER_PREFIX}{os.getpid()}-{seen_start()}-abc",
    )
    other = tmp_path / "meshwright-something-else"
    for each in (left, own, other):
        each.mkdir()
    remove_stale_folders()
    assert (left.exists(), own.exists(), other.exists()) == (False, True, True)


def seen_start():
    from meshwright.telemetry.heartbeat import process_start

    return process_start(os.getpid())


FRAME = '  File "/site/{}.py", line 7 in {}'
SPY = "    {1} ({0}.py:7)"
TRANSFER_WAIT = f"{PendingTransfer.wait.__code__.co_filename.removesuffix('.py')} {PendingTransfer.wait.__name__}"
STACKS = {
    "a pipeline's receive": (
        True,
        ["torch/distributed/pipelining/schedules _wait_batch_p2p", "meshwright/train/step run"],
    ),
    "a gather in backward": (
        True,
        ["torch/distributed/fsdp/_fully_shard/_fsdp_collectives wait", "torch/autograd/graph _engine_run_backward"],
    ),
    "a ring's next keys": (True, [TRANSFER_WAIT, "meshwright/parallel/context_parallel/ring visits"]),
    "rows on their way to experts": (
        True,
        ["torch/distributed/distributed_c10d all_to_all_single", "meshwright/parallel/expert sent"],
    ),
    "a kernel in a stage's backward": (
        False,
        ["torch/autograd/graph _engine_run_backward", "torch/distributed/pipelining/_backward stage_backward"],
    ),
    "a kernel between two messages of a ring": (
        False,
        ["meshwright/parallel/attention attend_block", "meshwright/parallel/context forward"],
    ),
    "a kernel in a stage's forward": (
        False,
        ["torch/nn/modules/linear forward", "meshwright/model/decoder forward", "torch/distributed/pipelining/stage f"],
    ),
}


@pytest.mark.parametrize("what", STACKS)
@pytest.mark.parametrize(
    ("head", "frame"), [("Current thread 0x1 (most recent call first):", FRAME), ("MainThread", SPY)]
)
def test_a_stack_tells_whether_a_rank_waits_for_a_message(what, head, frame):
    waits, frames = STACKS[what]
    assert in_collective("\n".join([head, *(frame.format(*each.split()) for each in frames)])) == waits


def test_where_all_are_between_two_passes_the_one_whose_stack_waits_for_nothing_is_named(folder, monkeypatch):
    for page in pages(folder, 3):
        page.enter("sync", 5)
    dog = Watchdog(folder, 1, hang_timeout=0.0, straggler_ratio=1.5)
    monkeypatch.setattr(Watchdog, "waits_inside", lambda _self, rank, *_: rank != 1)
    monkeypatch.setattr("meshwright.recover.watchdog.dump_stack", lambda *_: "")
    dog.check()
    assert dog.check()[0].rank == 1
