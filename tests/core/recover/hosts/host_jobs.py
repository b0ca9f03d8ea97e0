"""Jobs on hosts that are network namespaces of this machine, and the oracles that judge them after a fault."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import train
from meshwright.base.checkpoint.listing import list_checkpoint_folders, list_leases, list_published, open_run_store
from meshwright.base.records.events import read_events
from meshwright.base.records.incidents import Incident, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.checkpoint.verify import find_damage
from tests.kit.network_hosts import Host, NetworkHosts
from tests.kit.small_run import SMALL, small_config, step_records

SECRET = "0123456789abcdef0123456789abcdef"
STEPS = 60
HOST_TIMEOUT = 5.0
OPTIONS = (
    *SMALL,
    "--checkpoint.every=4",
    "--checkpoint.seconds=0",
    "--eval.every=0",
    "--numerics.compare_every=0",
    f"--launch.host_timeout={HOST_TIMEOUT:g}",
    "--launch.collective_timeout=120",
    "--launch.rendezvous_timeout=40",
)
SLOW_STEP = "step.update:rank0:slow=0.15x99"
"""Keeps a run going long enough to disturb it; it has no effect on the numbers."""


def golden_run(folder: Path, ranks: int, steps: int = STEPS) -> dict[str, Any]:
    """The losses and the final state of an undisturbed run on one host."""
    config = small_config(*OPTIONS, steps=steps, ranks=ranks)
    result = train(config, run=folder, quiet=True)
    return {"digest": result.digest, "losses": losses(folder), "state": newest_state(folder)}


def losses(folder: Path) -> list[str]:
    """The loss of every step, as exact hexadecimal numbers; the last attempt that completed a step counts."""
    return [float(record["loss"]).hex() for _, record in sorted(step_records(folder).items())]


def newest_state(folder: Path) -> str:
    return state_digest(list_published(open_run_store(RunFolder(folder)))[0])


class HostJob:
    """One supervisor per host, all with the same command."""

    def __init__(self, network: NetworkHosts, folder: Path, hosts: int, ranks: int, *options: str) -> None:
        self.network, self.folder, self.logs = network, RunFolder(folder), folder.parent / "logs"
        self.logs.mkdir(exist_ok=True)
        self.command = [sys.executable, "-m", "meshwright", "train", "--run", str(folder), "--ranks", str(ranks)]
        self.command += ["--steps", str(STEPS), f"--launch.hosts={hosts}", *OPTIONS, *options]
        self.supervisors: dict[str, subprocess.Popen] = {}
        self.secret = SECRET

    def start(self, *hosts: Host) -> HostJob:
        for host in hosts:
            environment = {"MESHWRIGHT_JOB_SECRET": self.secret, "OMP_NUM_THREADS": "1", "MESHWRIGHT_FAULT": SLOW_STEP}
            with open(self.logs / f"{host.name}.log", "ab") as log:
                self.supervisors[host.name] = host.run(self.command, env=environment, stdout=log, stderr=log)
        return self

    def log(self, host: Host) -> str:
        return (self.logs / f"{host.name}.log").read_text()

    def all_logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.logs.iterdir()))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s\n{self.all_logs()}"
            time.sleep(0.1)

    def steps_done(self) -> int:
        try:
            return max(step_records(self.folder.root), default=-1) + 1
        except OSError:
            return 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.steps_done() >= step)

    def leader(self) -> Host:
        """The host that holds the newest lease."""
        _, lease = list_leases(open_run_store(self.folder))[0]
        return next(host for host in self.network if host.name == lease["host"])

    def wait_for_host(self, role: str, step: int = 10) -> Host:
        """Waits until this step of the newest attempt, and returns the host that leads, or the one with rank 1."""
        self.wait_until(lambda: self.steps_in_attempt(self.attempts()) > 0 and self.steps_done() >= step)
        leader = self.leader()
        if role == "leader":
            return leader
        starts = [event for event in read_events(self.folder.events(0)) if event["kind"] == "start"]
        name = starts[-1]["hosts"][-1]
        return next(host for host in self.network if host.name == name)

    def attempts(self) -> int:
        return len(self.folder.attempts())

    def steps_in_attempt(self, attempt: int) -> int:
        try:
            events = read_events(self.folder.events(0))
        except OSError:
            return 0
        return sum(event["kind"] == "step" and event["attempt"] == attempt for event in events)

    def use_secret(self, secret: str) -> None:
        self.secret = secret

    def finish(self, *hosts: Host, seconds: float = 120.0) -> list[int]:
        """Waits for the supervisors of these hosts, and returns their exit codes."""
        deadline = time.monotonic() + seconds
        codes = []
        for host in hosts:
            try:
                codes.append(self.supervisors[host.name].wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{host.name} has not ended\n{self.all_logs()}") from None
        return codes

    def incidents(self) -> list[Incident]:
        return read_incidents(self.folder)

    def judge(self, golden: dict[str, Any]) -> None:
        """Same bits as the undisturbed run, every step once, one writer, and nothing damaged."""
        assert losses(self.folder.root) == golden["losses"], self.all_logs()
        assert newest_state(self.folder.root) == golden["state"]
        self.judge_checkpoints()

    def judge_samples(self, golden: dict[str, Any]) -> None:
        """On other numbers of ranks sums are ordered differently: the losses agree in float32, and every step is there
        once.
        """
        found = [float.fromhex(loss) for loss in losses(self.folder.root)]
        np.testing.assert_allclose(found, [float.fromhex(loss) for loss in golden["losses"]], rtol=1e-4)
        self.judge_checkpoints()

    def judge_checkpoints(self) -> None:
        store = open_run_store(self.folder)
        published = list_published(store)
        assert [problem for entry in published for problem in find_damage(entry)] == []
        digests = {entry.manifest.digest for entry in list_checkpoint_folders(store) if entry.manifest is not None}
        digests |= {parent for _, lease in list_leases(store) for parent in lease["inherited"].values()}
        assert all(not entry.manifest.parent or entry.manifest.parent in digests for entry in published[:-1])
        attempts = [entry.attempt for entry in sorted(published, key=lambda entry: entry.step)]
        assert attempts == sorted(attempts), "a later step was published by an earlier attempt"
