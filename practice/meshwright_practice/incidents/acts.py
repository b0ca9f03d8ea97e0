"""What the job of an incident does, act by act: trains, loses a host, deletes or damages checkpoints."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.environment import start_python
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError, MeshwrightError, PeerError, StoppedBySignal
from meshwright_practice.incidents.incident import Act, DamageCheckpoint, DeleteCheckpoints, TrainOnHosts, TrainRun

FAULT_VARIABLE = "MESHWRIGHT_FAULT"
RANKS = "--ranks="
"""An option of the command line, and no config key."""
HOSTS = ("node-a", "node-b")
POLL_SECONDS = 0.02
END_SECONDS = 20.0
"""Seconds that the supervisors of hosts have to end after a signal."""


def perform(act: Act, run: Path) -> None:
    """Performs an act in the run folder. A run that fails raises its error."""
    match act:
        case TrainRun():
            train_run(act, run)
        case TrainOnHosts():
            train_on_hosts(act, run)
        case DeleteCheckpoints():
            for entry in list_published(open_run_store(RunFolder(run))):
                if entry.step > act.after:
                    shutil.rmtree(run / entry.folder)
        case DamageCheckpoint():
            damage_checkpoint(act, run)


def train_run(act: TrainRun, run: Path) -> None:
    """Trains on ranks that are forked from this process. The fault is in the memory of this process alone: the
    environment that other processes can see is the one with which this process was started.
    """
    from meshwright.core.api.training import train
    from meshwright_practice.incidents.parts import arrange_parts

    parts = arrange_parts(act.part)
    ranks = next(setting for setting in act.settings if setting.startswith(RANKS))
    settings = [setting for setting in act.settings if setting != ranks]
    config = load_run_config(None, settings, ranks.removeprefix(RANKS), own_model=bool(parts))
    os.environ[FAULT_VARIABLE] = act.fault
    try:
        train(config, run=run, fork=act.fork, **parts)
    finally:
        del os.environ[FAULT_VARIABLE]


def damage_checkpoint(act: DamageCheckpoint, run: Path) -> None:
    newest = max(list_published(open_run_store(RunFolder(run))), key=lambda entry: entry.step)
    path = run / newest.folder / f"rank-{act.rank:05d}.shard"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def train_on_hosts(act: TrainOnHosts, run: Path) -> None:
    """Runs one supervisor per host, and kills that of one host with its ranks."""
    secret = secrets.token_hex(16)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host in HOSTS:
            processes[host] = start_host(act, run, host, secret)
            if host == HOSTS[0]:
                wait_for(lambda: (run / "attempts" / "0001").exists(), processes)  # it leads the job
        wait_for(lambda: completed_steps(run) >= act.step, processes)
        processes.pop(act.lost).kill()
        wait_for(lambda: all(process.poll() is not None for process in processes.values()), {})
    except BaseException:
        end_hosts(list(processes.values()))
        raise
    if code := max(process.returncode for process in processes.values()):
        raise PeerError(f"the job on {len(HOSTS)} hosts has ended with exit code {code}", "see the end of job.log")


def start_host(act: TrainOnHosts, run: Path, host: str, secret: str) -> subprocess.Popen[bytes]:
    names = {"MESHWRIGHT_JOB_SECRET": secret, "MESHWRIGHT_HOST_NAME": host, "MESHWRIGHT_HOST_ADDRESS": "127.0.0.1"}
    command = "meshwright", "train", "--run", str(run), *act.settings
    return start_python(*command, env=os.environ | names, preexec_fn=partial(exit_with_parent, os.getpid()))


def wait_for(condition: Callable[[], bool], processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Waits until a condition holds. Raises if a host ends before."""
    while not condition():
        ended = [host for host, process in processes.items() if process.poll() is not None]
        if ended:
            raise ConfigError(f"host {ended[0]} has ended too early", "see the end of job.log")
        time.sleep(POLL_SECONDS)


def completed_steps(run: Path) -> int:
    path = RunFolder(run).events(0)
    if not path.exists():
        return 0
    return max((int(event["step"]) + 1 for event in read_events(path) if event["kind"] == "step"), default=0)


def end_hosts(processes: list[subprocess.Popen[bytes]]) -> None:
    """Asks the supervisors to stop, and kills those that do not."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def was_stopped(error: BaseException) -> bool:
    """Whether a run ended because it was asked to."""
    return isinstance(error, StoppedBySignal) or (isinstance(error, MeshwrightError) and error.exit_code >= 128)
