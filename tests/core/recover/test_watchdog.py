"""The watchdog picks the right suspect, finds stragglers, and dumps stacks."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshwright.base.records.heartbeat import Heartbeat, read_heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.parallel.context_parallel.ring_attention import PendingTransfer
from meshwright.core.recover.watchdog import (
    STRAGGLER_WINDOW,
    Watchdog,
    dump_stack,
    find_collective_mismatch,
    in_collective,
    pick_suspect,
)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.attempt(1).mkdir(parents=True)
    return folder


def write_heartbeats(folder, count):
    return [Heartbeat(folder.heartbeat(1, rank)) for rank in range(count)]


def read_back(folder, count):
    return {rank: read_heartbeat(folder.heartbeat(1, rank)) for rank in range(count)}


def test_waiting_rank_is_never_the_suspect(folder):
    waiting, busy, late = write_heartbeats(folder, 3)
    waiting.enter("sync", 5)
    busy.enter("forward", 5)
    late.enter("fetch", 6)
    late.set_waiting(True)
    assert pick_suspect(read_back(folder, 3), [0, 1, 2], {0, 2}) == 1


def test_rank_with_the_fewest_collectives_is_the_suspect_if_all_wait(folder):
    for rank, heartbeat in enumerate(write_heartbeats(folder, 3)):
        for _ in range(3 - (rank == 2)):
            heartbeat.collective("sum")
        heartbeat.enter("sync", 5)
    assert pick_suspect(read_back(folder, 3), [0, 1, 2], {0, 1, 2}) == 2


def test_first_mismatched_collective_is_found(folder):
    for rank, heartbeat in enumerate(write_heartbeats(folder, 3)):
        for number in range(10):
            heartbeat.collective("stray" if (rank, number) == (1, 6) else f"sum {number}")
    assert (
        "collective 7 is 'stray' on rank 1 and 'sum 6' on rank(s) 0, 2"
        in find_collective_mismatch(read_back(folder, 3))[1]
    )
    assert find_collective_mismatch(read_back(folder, 3))[0] == 1


@pytest.mark.parametrize(
    ("state", "seconds", "words"),
    [
        ("R", 9.0, r"busy \(used 9\.0 s of processor time\)"),
        ("R", 1.0, r"busy \(used 1\.0 s of processor time\)"),  # many processes share the processors
        ("S", 9.0, r"busy \(used 9\.0 s of processor time\)"),
        ("R", 0.1, "sleeping"),  # it has just been woken up
        ("S", 1.0, "sleeping"),
    ],
)
def test_process_that_gets_little_of_a_processor_is_busy(folder, state, seconds, words):
    watchdog, before = Watchdog(folder, 1, hang_timeout=10, straggler_ratio=2), 100
    ticks = before + round(seconds * os.sysconf("SC_CLK_TCK"))
    heartbeat = SimpleNamespace(stat={"state": state, "ticks": ticks}, is_stopped=False)
    assert re.fullmatch(f"its process is {words}", watchdog.process_state(heartbeat, before))


def test_straggler_is_named_with_its_phase_and_waiting_does_not_count(folder):
    created = write_heartbeats(folder, 3)
    watchdog = Watchdog(folder, 1, hang_timeout=100, straggler_ratio=1.5)

    def work(steps):
        for rank, heartbeat in enumerate(created):
            for _ in range(steps):
                own = {"fetch": 0.3 if rank == 2 else 0.01, "forward": 0.1, "sync": 0.0 if rank == 2 else 0.29}
                heartbeat.complete_step(own)
                heartbeat.enter("update", heartbeat.completed_steps)

    watchdog.check()
    work(STRAGGLER_WINDOW)
    assert watchdog.check()[1] == []  # the first window includes start-up
    work(STRAGGLER_WINDOW)
    (straggler,) = watchdog.check()[1]
    assert (straggler.rank, straggler.phase) == (2, "fetch")
    assert 3.4 < straggler.factor < 3.8
    assert "rank 2 is slow: 3.6 times the others" in str(straggler)


def test_dump_stack_uses_py_spy_if_installed(folder, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "stack of $4"\n')
    spy.chmod(spy.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_heartbeats(folder, 1)
    assert dump_stack(read_back(folder, 1)[0], tmp_path / "log") == f"stack of {os.getpid()}\n"


def test_dump_stack_ignores_a_process_with_a_reused_pid(folder, tmp_path):
    from dataclasses import replace

    write_heartbeats(folder, 1)
    reused = replace(read_back(folder, 1)[0], process_started=1)
    assert dump_stack(reused, tmp_path / "log") == ""


FRAME = '  File "/site/{}.py", line 7 in {}'
SPY = "    {1} ({0}.py:7)"
TRANSFER_WAIT = f"{PendingTransfer.wait.__code__.co_filename.removesuffix('.py')} {PendingTransfer.wait.__name__}"
STACKS = {
    "receive of a pipeline stage": (
        True,
        ["torch/distributed/pipelining/schedules _wait_batch_p2p", "meshwright/train/step run"],
    ),
    "FSDP all-gather in backward": (
        True,
        ["torch/distributed/fsdp/_fully_shard/_fsdp_collectives wait", "torch/autograd/graph _engine_run_backward"],
    ),
    "transfer of ring attention": (
        True,
        [TRANSFER_WAIT, "meshwright/core/parallel/context_parallel/ring_attention visits"],
    ),
    "FSDP all-gather that is timed": (
        True,
        [
            "meshwright/core/telemetry/collective_waits measure",
            "meshwright/core/telemetry/collective_waits timed_wait",
            "meshwright/core/torch_private wrapped",
            "torch/distributed/fsdp/_fully_shard/_fsdp_collectives wait",
        ],
    ),
    "all-gather that is counted": (
        True,
        [
            "torch/_ops __call__",
            "meshwright/core/fake_operators run_operator",
            "meshwright/core/telemetry/comm_counter observe",
            "meshwright/core/trainer/records/step_counters observe",
            "torch/_library/autograd autograd_impl",
            "torch/distributed/_functional_collectives wait_tensor",
        ],
    ),
    "all-to-all of expert dispatch": (
        True,
        ["torch/distributed/distributed_c10d all_to_all_single", "meshwright/core/parallel/expert_parallel forward"],
    ),
    "kernel in the backward of a stage": (
        False,
        ["torch/autograd/graph _engine_run_backward", "torch/distributed/pipelining/_backward stage_backward"],
    ),
    "kernel between two transfers of ring attention": (
        False,
        [
            "meshwright/core/parallel/context_parallel/blockwise_attention block_attention",
            "meshwright/core/parallel/context_parallel/ring_attention forward",
        ],
    ),
    "kernel in the forward of a stage": (
        False,
        [
            "torch/nn/modules/linear forward",
            "meshwright/core/models/layers/decoder forward",
            "torch/distributed/pipelining/stage f",
        ],
    ),
}


@pytest.mark.parametrize("what", STACKS)
@pytest.mark.parametrize(
    ("head", "frame"), [("Current thread 0x1 (most recent call first):", FRAME), ("MainThread", SPY)]
)
def test_in_collective_recognizes_a_rank_that_waits(what, head, frame):
    waits, frames = STACKS[what]
    assert in_collective("\n".join([head, *(frame.format(*entry.split()) for entry in frames)])) == waits


def test_rank_whose_stack_does_not_wait_is_the_suspect_between_two_passes(folder, monkeypatch):
    for heartbeat in write_heartbeats(folder, 3):
        heartbeat.enter("sync", 5)
    watchdog = Watchdog(folder, 1, hang_timeout=0.0, straggler_ratio=1.5)
    monkeypatch.setattr(Watchdog, "waits_inside", lambda _self, rank, *_: rank != 1)
    monkeypatch.setattr("meshwright.core.recover.watchdog.dump_stack", lambda *_: "")
    watchdog.check()
    assert watchdog.check()[0].rank == 1


def test_stopped_launcher_without_ranks_is_a_hang_after_the_start_timeout(folder):
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watchdog = Watchdog(folder, 1, 100.0, 1.5, launcher.pid, start_timeout=0.0)
        assert watchdog.check()[0] is None  # a launcher that is not stopped may still import torch
        os.kill(launcher.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
        hang = watchdog.check()[0]
    finally:
        launcher.kill()
        launcher.wait()
    assert hang.rank == -1
    assert hang.message.startswith("the fork server has not started a rank within")
    assert f"its process {launcher.pid} is stopped" in hang.message
