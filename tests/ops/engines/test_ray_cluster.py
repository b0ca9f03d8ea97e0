"""Runs on a local Ray cluster: after a killed worker or a removed node, a run has the digest of an undisturbed one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.engines.engine_runs import ENVIRONMENT, final_digest, newest_step, write_run_file
from tests.ops.engines.slurm_cluster import wait_until

pytestmark = pytest.mark.engines
STEPS = 40
MARK = "MESHWRIGHT_TEST_CLUSTER"


class LocalRay:
    """A head without CPUs, and nodes that run the supervisors."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self.mark = secrets.token_hex(8)
        os.environ[MARK] = self.mark
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        self.nodes = [self.cluster.add_node(num_cpus=4, object_store_memory=80 << 20) for _ in range(nodes)]
        self.cluster.wait_for_nodes()

    def workers(self) -> list[int]:
        """The processes of the actors that run supervisors."""
        return self.processes("HostActor")

    def processes(self, command: str) -> list[int]:
        """The processes of this cluster with a text in their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                own = f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0")
                if own and command.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def node_of(self, pid: int) -> object:
        """The node whose raylet is the parent of a worker."""
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for node in self.nodes:
            if any(info.process.pid == parent for info in node.all_processes["raylet"]):
                return node
        raise AssertionError(f"worker {pid} has the parent {parent}")

    def close(self) -> None:
        self.cluster.shutdown()
        del os.environ[MARK]


@pytest.fixture
def local_ray(monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'meshwright[engines]'")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank0:slow=0.25x99")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    started = []

    def start(nodes: int) -> LocalRay:
        started.append(LocalRay(nodes))
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()


class RunningJob:
    """`meshwright launch ray` as a process."""

    def __init__(self, cluster: LocalRay, folder: Path, *options: str) -> None:
        self.run, self.log = folder / "run", folder / "log"
        command = [sys.executable, "-m", "meshwright", "launch", "ray", str(write_run_file(folder, STEPS))]
        command += ["--run", str(self.run), "--ray-address", cluster.cluster.address, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_for_checkpoint(self) -> None:
        wait_until(lambda: newest_step(self.run) >= 5, lambda: self.log.read_text(), 240)

    def wait(self, seconds: float = 300) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log.read_text()) from None

    def assert_complete(self, digest: str) -> None:
        assert self.wait() == 0, self.log.read_text()
        assert final_digest(self.run, STEPS) == digest
        assert not (self.run.with_name("run.launch") / "secret").exists()


def test_killed_worker_is_restarted_by_ray_and_the_run_continues(local_ray, tmp_path, undisturbed):
    cluster = local_ray(1)
    job = RunningJob(cluster, tmp_path)
    job.wait_for_checkpoint()
    (worker,) = cluster.workers()
    os.kill(worker, signal.SIGKILL)
    job.assert_complete(undisturbed)
    assert len(list((job.run / "attempts").iterdir())) == 2


def test_run_on_a_node_that_is_removed_continues_on_another(local_ray, tmp_path, undisturbed):
    cluster = local_ray(2)
    job = RunningJob(cluster, tmp_path)
    job.wait_for_checkpoint()
    (worker,) = cluster.workers()
    cluster.cluster.remove_node(cluster.node_of(worker), allow_graceful=False)
    job.assert_complete(undisturbed)


def test_two_hosts_continue_after_one_node_is_removed(local_ray, tmp_path, undisturbed):
    cluster = local_ray(3)
    job = RunningJob(cluster, tmp_path, "--hosts", "2", "--launch.host_timeout=5")
    job.wait_for_checkpoint()
    cluster.cluster.remove_node(cluster.node_of(cluster.workers()[0]), allow_graceful=False)
    job.assert_complete(undisturbed)


def test_sigterm_to_the_driver_stops_the_run_after_a_checkpoint(local_ray, tmp_path):
    cluster = local_ray(1)
    job = RunningJob(cluster, tmp_path)
    job.wait_for_checkpoint()
    before = newest_step(job.run)
    driver = int(Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()[0])
    os.kill(driver, signal.SIGTERM)
    assert job.wait() == 143, job.log.read_text()
    assert newest_step(job.run) > before


TRAINER = """
import ray, sys
from meshwright.ops.engines.ray_train import make_trainer
address, run_file, run, storage = sys.argv[1:]
ray.init(address=address)
make_trainer(run_file, run, 2, max_failures=2, storage=storage).fit()
print("the trainer has returned")
"""


def test_ray_train_restarts_a_killed_rank_and_the_run_continues(local_ray, tmp_path, undisturbed):
    pytest.importorskip("pandas", reason="ray[train] is not installed: pip install 'meshwright[engines]'")
    cluster = local_ray(1)
    run, log = tmp_path / "run", tmp_path / "log"
    args = [cluster.cluster.address, str(write_run_file(tmp_path, STEPS)), str(run), str(tmp_path / "storage")]
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", TRAINER, *args], stdout=output, stderr=output)
    try:
        wait_until(lambda: newest_step(run) >= 5, lambda: log.read_text()[-3000:], 240)
        ranks = cluster.processes("meshwright\0train\0")
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(300) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    assert final_digest(run, STEPS) == undisturbed
    assert len(list((run / "attempts").iterdir())) == 2
    assert "the trainer has returned" in log.read_text()
