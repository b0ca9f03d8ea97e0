"""Ray: one supervisor per node as an actor of a placement group, restarted by Ray and by the supervisors. Torch-free.

The script that `meshwright launch ray` writes calls `train_on_ray`. Ray is imported where it is used: it is in the
extra `engines`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.base.environment import stop_signals
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.ops.engines.engine_job import write_files
from meshwright.ops.engines.exit_codes import action_of

SECONDS_AFTER_FIRST = 60.0
"""Seconds that the other hosts have to end after the first one has; all of them end with the same exit code."""
SECRET_NAME = "secret"
LOST_HOST = 8
"""The exit code of a host that Ray could not start again."""


class HostActor:
    """The actor of one node: runs the supervisor of its host as a child process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = list(command), dict(environment)
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def run(self) -> int:
        """Runs the supervisor to its end. Ray calls this again if it has restarted the actor."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        own = {
            "MESHWRIGHT_HOST_NAME": f"{socket.gethostname()}-{node[:8]}",
            "MESHWRIGHT_HOST_ADDRESS": ray.util.get_node_ip_address(),
        }
        parent = os.getpid()
        # A worker that is killed must not leave its supervisor behind: Ray starts another one.
        self.process = subprocess.Popen(
            self.command, env=os.environ | self.environment | own, preexec_fn=lambda: exit_with_parent(parent)
        )
        if self.stopped:
            self.process.terminate()
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Asks the supervisor to stop after a checkpoint."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


def train_on_ray(
    command: Sequence[str],
    run: str | Path,
    folder: str | Path,
    *,
    hosts: int,
    spares: int = 0,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
    address: str = "auto",
    start_timeout: float = 300.0,
) -> int:
    """Runs the supervisors of a job on a Ray cluster until the run is complete, and returns their exit code.

    Args:
        command: what every host runs.
        run: the run folder, which all hosts share.
        folder: the job folder, also shared, for the secret of the job.
        hosts, spares: the number of nodes. Every supervisor is on a node of its own.
        cpus, gpus: the resources of a node that its ranks need.
        retries: restarts of a supervisor's actor by Ray, and of the whole job in a row without a new checkpoint.
        address: the Ray cluster; `auto` is the one that runs on this machine.
        start_timeout: seconds until the placement group must be ready.
    """
    ray = import_ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=True)
    group = make_placement_group(ray, hosts + spares, cpus, gpus, start_timeout)
    job = RayJob(ray, group, command, Path(folder), cpus, gpus, retries)
    try:
        with stop_on_signal(job):
            return run_until_decided(job, RunFolder(Path(run)), retries)
    finally:
        (Path(folder) / SECRET_NAME).unlink(missing_ok=True)
        ray.util.remove_placement_group(group)


def import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("ray is not installed", "try pip install 'meshwright[engines]'") from None
    return ray


def make_placement_group(ray: Any, nodes: int, cpus: float, gpus: float, timeout: float) -> Any:
    """Reserves the resources of every host on a node of its own."""
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    group = ray.util.placement_group([dict(bundle) for _ in range(nodes)], strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=timeout):
        alive = [node for node in ray.nodes() if node["Alive"]]
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster has {len(alive)} node(s), and the job needs {nodes} with {bundle} each",
            "try to add nodes, or fewer --hosts and --spares",
        )
    return group


def is_one_host(code: int) -> bool:
    """Whether an exit code tells about one host only: it was lost, or its supervisor was killed or left the job. The
    supervisors of the other hosts decide how the job goes on.
    """
    return code in (LOST_HOST, 128 + signal.SIGKILL)


class RayJob:
    """The actors of one start of a job."""

    def __init__(
        self,
        ray: Any,
        group: Any,
        command: Sequence[str],
        folder: Path,
        cpus: float,
        gpus: float,
        retries: int,
    ) -> None:
        self.ray, self.group, self.command, self.folder = ray, group, command, folder
        self.options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": retries, "max_task_retries": retries}
        self.actors: list[Any] = []
        self.signalled = threading.Event()

    def run(self) -> list[int]:
        """Starts one supervisor per node and returns their exit codes."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A secret belongs to one start: supervisors with the secret of a job that has been stopped would end at once.
        (secret,) = write_files(self.folder, {SECRET_NAME: secrets.token_hex(32)}, private=(SECRET_NAME,))
        environment = {"MESHWRIGHT_JOB_SECRET_FILE": str(secret)}
        remote = self.ray.remote(HostActor)
        self.actors = [
            remote.options(  # two threads: one runs the supervisor, the other one can stop it
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
                **self.options,
            ).remote(list(self.command), environment)
            for index in range(self.group.bundle_count)
        ]
        pending = [actor.run.remote() for actor in self.actors]
        codes: list[int] = []
        deadline = float("inf")
        sent = False
        while pending and time.monotonic() < deadline:
            done, pending = self.ray.wait(pending, timeout=0.5)
            for reference in done:
                codes.append(self.result(reference))
                if not is_one_host(codes[-1]):
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FIRST)
            if self.signalled.is_set() and not sent:
                sent = True
                for actor in self.actors:
                    actor.stop.remote()
        for actor in self.actors:
            self.ray.kill(actor)
        return codes

    def result(self, reference: Any) -> int:
        from ray.exceptions import RayError

        try:
            return int(self.ray.get(reference))
        except RayError as error:
            print(f"meshwright: a host is lost: {' '.join(str(error).split())[:300]}", file=sys.stderr)
            return LOST_HOST


class stop_on_signal:
    """While it is open, the signals that stop a job stop this one after a checkpoint."""

    def __init__(self, job: RayJob) -> None:
        self.job = job

    def __enter__(self) -> None:
        numbers = stop_signals() if threading.current_thread() is threading.main_thread() else ()
        self.handlers = {number: signal.signal(number, self.note) for number in numbers}

    def note(self, _number: int, _frame: Any) -> None:
        self.job.signalled.set()

    def __exit__(self, *_error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


def run_until_decided(job: RayJob, folder: RunFolder, retries: int) -> int:
    """Starts the supervisors again while another start can help, and returns the last exit code."""
    failures, step = 0, -1
    while True:
        code = code_of_job(job.run())
        action = action_of(code)
        if action in ("done", "fail") or job.signalled.is_set():
            return code
        newest = newest_step(folder)
        failures = 0 if newest > step else failures
        step = max(step, newest)
        if action == "retry":
            failures += 1
            if failures > retries:
                return code
        print(f"meshwright: exit code {code}; the job starts again from step {max(step, 0)}", file=sys.stderr)


def code_of_job(codes: Sequence[int]) -> int:
    """One exit code for the job: a host that was lost does not matter if the others completed the run."""
    if 0 in codes:
        return 0
    final = [code for code in codes if action_of(code) == "fail"]
    return next(iter([*final, *(code for code in codes if code == 143), *codes]), LOST_HOST)


def newest_step(folder: RunFolder) -> int:
    """The step of the newest checkpoint, or -1."""
    from meshwright.base.checkpoint.listing import list_published, open_run_store

    with suppress(OSError):
        published = list_published(open_run_store(folder))
        return published[0].step if published else -1
    return -1
