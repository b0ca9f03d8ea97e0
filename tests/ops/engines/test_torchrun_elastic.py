"""torchrun with a range of nodes: the layout follows the ranks that it starts, and the sample order stays the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.errors import ConfigError, PeerError
from meshwright.ops.engines.torchrun_elastic import agree_on_generation, follow_world_size
from tests.kit.small_run import small_config, step_records
from tests.ops.engines.engine_runs import ENVIRONMENT, ROOT, newest_step, write_run_file
from tests.ops.engines.slurm_cluster import free_ports, wait_until

STEPS = 60
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def torchrun_environment(world_size: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(world_size)}


def test_layout_follows_the_world_size_of_torchrun_and_keeps_the_global_batch():
    config = small_config("--launch.elastic=true", "--layout.tensor=2", ranks=4)
    followed = follow_world_size(config, environment=torchrun_environment(8))
    assert (followed.layout.replicate, followed.layout.tensor) == (4, 2)
    assert followed.batch.global_ == config.batch.global_


def test_layout_stays_without_the_setting_and_without_torchrun():
    config = small_config(ranks=2)
    assert follow_world_size(config, environment=torchrun_environment(4)) is config
    elastic = small_config("--launch.elastic=true", ranks=2)
    assert follow_world_size(elastic, environment={}) is elastic


def test_world_size_that_does_not_divide_the_batch_is_refused_with_those_that_do():
    config = small_config("--launch.elastic=true", ranks=2)
    with pytest.raises(ConfigError, match="cannot continue on the 3 ranks") as refused:
        follow_world_size(config, environment=torchrun_environment(3))
    assert refused.value.hint == "expected 1, 2, 4, 8, 16 ranks"


def agree(stores: list, timeout: float = 10) -> list[str]:
    names: list = [None] * len(stores)

    def join(rank: int) -> None:
        names[rank] = agree_on_generation(stores[rank], rank, len(stores), timeout)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(stores))]
    for thread in reversed(threads):  # the others read the old name before rank 0 sets a new one
        thread.start()
    for thread in threads:
        thread.join(timeout + 5)
    return names


def test_ranks_agree_on_a_new_name_although_the_store_has_old_ones(tmp_path):
    stores = [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(3)]
    names = {tuple(agree(stores)) for _ in range(3)}
    assert len(names) == 3
    assert all(len(set(generation)) == 1 and None not in generation for generation in names)


def test_rank_that_does_not_join_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(PeerError, match=r"rank\(s\) 1, 2 have not joined"):
        agree_on_generation(store, 0, 3, 0.3)


class Agent:
    """One torchrun agent, as on one node."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.log = folder / f"{name}.log"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
        rendezvous += ["--rdzv-conf=last_call_timeout=30,keep_alive_interval=3,keep_alive_max_attempt=4"]
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--local-addr=127.0.0.1"]
        job = ["-m", "meshwright", "train", str(folder / "small.toml"), "--run-dir", str(folder / "run")]
        job += ["--launch.elastic=true", "--precision.compute=fp64"]
        environment = os.environ | ENVIRONMENT | {"MESHWRIGHT_FAULT": "step.forward:rank0:slow=1x99"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [TORCHRUN, *options, *rendezvous, *job],
                cwd=ROOT,
                env=environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Ends the agent and its ranks at once, as a node that dies does."""
        pids, pending = [self.process.pid], [self.process.pid]
        while pending:
            pid = pending.pop()
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            pids += children
            pending += children
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.engines
def test_run_continues_on_fewer_ranks_and_again_on_more(tmp_path):
    write_run_file(tmp_path, STEPS)
    (port,) = free_ports(1)
    first = Agent(tmp_path, "first", port)
    wait_until(lambda: is_listening(port), lambda: first.log.read_text(), 60)  # the first agent serves the rendezvous
    agents = [first, Agent(tmp_path, "second", port)]
    run = tmp_path / "run"

    def logs() -> str:
        return "\n".join(agent.log.read_text()[-3000:] for agent in agents)

    def worlds() -> list[int]:
        from meshwright.base.records.events import read_events

        events = run / "events" / "rank-00000.jsonl"
        return [event["ranks"] for event in read_events(events) if event["kind"] == "start"] if events.exists() else []

    try:
        wait_until(lambda: newest_step(run) >= 5, logs, 180)
        assert worlds() == [2]
        agents[1].kill()
        wait_until(lambda: worlds() == [2, 1], logs, 180)
        agents.append(Agent(tmp_path, "third", port))
        assert first.process.wait(300) == 0, logs()
        assert agents[2].process.wait(60) == 0, logs()
        assert worlds() == [2, 1, 2]
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.kill()
    undisturbed = [sys.executable, "-m", "meshwright", "train", str(tmp_path / "small.toml")]
    undisturbed += ["--run", str(tmp_path / "undisturbed"), "--precision.compute=fp64"]
    subprocess.run(undisturbed, env=os.environ | ENVIRONMENT, check=True, timeout=120)
    expected, found = step_records(tmp_path / "undisturbed"), step_records(run)
    assert sorted(found) == list(range(STEPS))
    for step, record in expected.items():  # another layout sums in another order; float64 leaves 1e-10
        assert abs(found[step]["loss"] - record["loss"]) < 1e-10
