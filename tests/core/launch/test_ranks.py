"""Ranks are forked and joined in a process group; a failed, missing or differing rank is named."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from meshwright.base.config import LaunchConfig
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.core.launch.ranks import Ranks
from meshwright.core.launch.rendezvous import RendezvousInfo, join_process_group, leave_process_group
from meshwright.errors import ConfigError, DataError, IdentityError, PeerError
from meshwright.testing import run_ranks
from tests.kit.hostile_folder import fill_hostile_folder, imported

SHORT = LaunchConfig(rendezvous_timeout=3.0, collective_timeout=30.0, device="cpu")


def test_run_ranks_returns_values_and_tensors_in_rank_order():
    values = run_ranks(lambda world, x: (world.rank, x * world.all_reduce(torch.ones(3)).wait()), 3, 2.0)
    assert [rank for rank, _ in values] == [0, 1, 2]
    assert all(torch.equal(v, torch.full((3,), 6.0)) for _, v in values)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failing(world):
    if world.rank == 1:
        raise ZeroDivisionError("the real cause")
    world.all_reduce(torch.ones(1)).wait()


def test_ranks_failed_starts_with_the_root_cause_not_with_a_rank_that_lost_its_peer():
    for _ in range(3):  # the cause and the ranks that lose their peer may report in any order
        with pytest.raises(RanksFailed) as failed:
            run_ranks(failing, 3)
        assert (failed.value.first.rank, failed.value.first.error_type) == (1, "ZeroDivisionError")
        assert "the real cause" in str(failed.value).splitlines()[0]
        assert [f.secondary for f in failed.value.failures] == [False, True, True]
        assert failed.value.exit_code == 1


def test_killed_rank_is_reported_with_its_signal():
    def work(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(work, 2)
    assert (failed.value.first.rank, failed.value.exit_code) == (0, 8)
    assert "SIGKILL" in str(failed.value)


def test_run_ranks_kills_every_rank_after_the_timeout():
    pids = []

    def work(world):
        world.heartbeat.enter("forward", 7)
        time.sleep(60)

    class RecordingRanks(Ranks):
        def __init__(self, *args):
            super().__init__(*args)
            pids.extend(p.pid for p in self._processes.values())

    from meshwright.core.launch import ranks as module

    original, module.Ranks = module.Ranks, RecordingRanks
    try:
        with pytest.raises(RanksFailed, match=r"rank [01] had not ended after 3 s: step 7, forward") as failed:
            run_ranks(work, 2, timeout=3.0)
        assert {failure.rank for failure in failed.value.failures} == {0, 1}
        assert failed.value.step == 7
    finally:
        module.Ranks = original
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("failing", [2, 3])
def test_ranks_that_were_started_are_killed_if_another_process_cannot_be(tmp_path, monkeypatch, failing):
    """The third process is a rank or, with two ranks, the guard of their descendants."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids, fork = [], os.fork

    def limited_fork() -> int:
        if len(pids) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if pid := fork():
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", limited_fork)
    what = "rank 2 of 3" if failing == 3 else "the process that guards the ranks"
    with pytest.raises(ConfigError, match=f"{what} cannot be started: Resource temporarily unavailable; try fewer"):
        Ranks(lambda world: time.sleep(600), failing)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_ranks_are_started_kills_those_that_run(monkeypatch):
    pids, fork = [], os.fork

    def interrupted_fork() -> int:
        if pids:
            raise KeyboardInterrupt
        if pid := fork():
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", interrupted_fork)
    with pytest.raises(KeyboardInterrupt):
        Ranks(lambda world: time.sleep(600), 2)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def waiting_for_rank_0(world, started):
    (started / str(world.rank)).touch()
    if world.rank:
        world.all_reduce(torch.ones(1)).wait()
    time.sleep(600)


def test_ctrl_c_ends_the_ranks_without_tracebacks(tmp_path, monkeypatch, capfd):
    poll = Ranks.poll

    def interrupted(ranks, seconds):
        if len(list(tmp_path.iterdir())) == 3:
            time.sleep(0.5)  # the others wait for rank 0 by now
            raise KeyboardInterrupt
        return poll(ranks, min(seconds, 0.05))

    monkeypatch.setattr(Ranks, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(waiting_for_rank_0, 3, tmp_path)
    assert "Traceback" not in capfd.readouterr().err


class Finalized:
    """An object that counts how many of its class were finalized."""

    count = 0

    def __del__(self):
        Finalized.count += 1


def test_ranks_do_not_finalize_what_their_parent_has_not_collected():
    """Such as a process group, which would wait for threads that a fork does not have."""

    def collect(_world):
        gc.collect()
        return Finalized.count

    gc.disable()
    try:
        unreachable = Finalized()
        unreachable.itself = unreachable
        del unreachable
        assert run_ranks(collect, 2) == [0, 0]
    finally:
        gc.enable()
    gc.collect()
    assert Finalized.count == 1


def test_run_ranks_removes_its_temporary_folder(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(lambda world: world.rank, 2)
    assert list(tmp_path.iterdir()) == []


def test_rendezvous_names_ranks_whose_facts_differ(tmp_path):
    store = str(tmp_path / "store")

    def work(world):
        rendezvous = RendezvousInfo(world.rank, 3, world.rank, store_file=store)
        try:
            facts = {"config": "same", "dtype": "bf16" if world.rank == 1 else "fp32"}
            join_process_group(rendezvous, replace(SHORT, rendezvous_timeout=40.0), facts)
        except IdentityError as error:
            return str(error)
        finally:
            leave_process_group()

    messages = run_ranks(without_process_group, 3, work)
    assert all("dtype is fp32 on rank(s) 0, 2, bf16 on rank(s) 1" in message for message in messages)


def without_process_group(world, work):
    """Leaves the process group of `run_ranks`, because the test joins one itself."""
    dist.destroy_process_group()
    return work(world)


def test_rendezvous_names_a_missing_rank_within_the_timeout(tmp_path):
    store = str(tmp_path / "store")

    def work(world):
        start = time.monotonic()
        try:
            join_process_group(RendezvousInfo(world.rank, 3, world.rank, store_file=store), SHORT, {})
        except PeerError as error:
            return str(error), time.monotonic() - start

    for message, seconds in run_ranks(without_process_group, 2, work):
        assert "rank(s) 2 of 3 did not join within 3 s" in message
        assert seconds < 12


def test_rendezvous_names_differing_world_sizes(tmp_path):
    store, patient = str(tmp_path / "store"), replace(SHORT, rendezvous_timeout=40.0)

    def work(world):
        try:
            join_process_group(RendezvousInfo(world.rank, 2 + world.rank, world.rank, store_file=store), patient, {})
        except IdentityError as error:
            return str(error)

    assert all(
        "world size is 2 on rank(s) 0, 3 on rank(s) 1" in message
        for message in run_ranks(without_process_group, 2, work)
    )


def test_rendezvous_names_a_master_addr_that_does_not_resolve():
    with pytest.raises(PeerError, match=r"the name 'no-such-host\.invalid' does not resolve"):
        join_process_group(RendezvousInfo(1, 2, 1, master_addr="no-such-host.invalid", master_port=29500), SHORT, {})


def test_rendezvous_names_a_master_port_in_use():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"port {port} on localhost is in use"):
            join_process_group(
                RendezvousInfo(0, 2, 0, master_addr="localhost", master_port=port, hosts_store=True), SHORT, {}
            )


def test_rendezvous_names_a_host_that_does_not_answer():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(PeerError, match=rf"localhost:{port} did not answer within 1 s"):
        join_process_group(
            RendezvousInfo(1, 2, 1, master_addr="localhost", master_port=port),
            replace(SHORT, rendezvous_timeout=1.0),
            {},
        )
    assert time.monotonic() - start < 15


def test_rendezvous_info_is_read_from_torchrun_variables():
    rendezvous = RendezvousInfo.from_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    )
    assert rendezvous == RendezvousInfo(3, 4, 1, "", "a", 7, False)
    assert RendezvousInfo.from_environment({}) is None
    for wrong in ({"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}):
        with pytest.raises(ConfigError):
            RendezvousInfo.from_environment(wrong)


def test_failures_are_ordered_by_root_cause_then_time():
    late = Failure(0, "ValueError", "late", 1, 9.0)
    early = Failure(2, "ValueError", "early", 1, 5.0)
    lost = Failure.from_exception(
        1, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")
    )
    assert [f.rank for f in RanksFailed([late, lost, early]).failures] == [2, 0, 1]
    assert lost.exit_code == 8


SPAWNED = """
import meshwright.core.launch.ranks as ranks
ranks.cuda_started = lambda: True
from meshwright import train
from meshwright.base.config import load_config
config = load_config(steps=2, ranks=2, overrides=["--model.layers=1", "--data.kind=synthetic", "--launch.device=cpu"])
GUARD train(config, run="r", quiet=True)
"""


@pytest.mark.parametrize(
    ("guard", "code", "message"),
    [
        ("if __name__ == '__main__':", 0, ""),
        pytest.param("if True:", 1, "put the call under if __name__", marks=pytest.mark.long),
    ],
)
def test_ranks_are_spawned_after_cuda_initialization_and_an_unguarded_script_is_refused(tmp_path, guard, code, message):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED.replace("GUARD", guard))
    current = fill_hostile_folder(tmp_path / "current")
    done = subprocess.run([sys.executable, str(script)], cwd=current, capture_output=True, text=True, timeout=120)
    assert imported(current) == ""
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_arguments_of_spawned_ranks_that_cannot_be_pickled_are_refused(monkeypatch):
    from meshwright.core.launch import ranks as module

    monkeypatch.setattr(module, "cuda_started", lambda: True)
    with pytest.raises(ConfigError, match="ranks are spawned, and their arguments cannot be pickled"):
        run_ranks(lambda world: world.rank, 2)


@pytest.mark.parametrize("error_class", [ValueError, DataError])
def test_long_text_of_an_exception_is_cut(error_class):
    def work(_world):
        raise error_class("x" * 5_000_000)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(work, 1)
    first = failed.value.first
    assert first.message.startswith("x" * 4096 + " ... ")
    assert "characters cut" in str(failed.value)
    assert len(pickle.dumps(first)) < 20_000
    assert len(str(failed.value)) < 20_000
    assert len(str(failed.value.cause())) < 20_000


def test_exception_whose_text_cannot_be_formatted_is_reported_by_its_class():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def work(_world):
        raise Unprintable

    with pytest.raises(RanksFailed, match="Unprintable"):
        run_ranks(work, 1)
