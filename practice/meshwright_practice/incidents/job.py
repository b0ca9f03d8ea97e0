"""The job of an incident: where it is, whether it runs, how it starts and how it stops. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.base.environment import start_python
from meshwright.base.io import meshwright_home, read_json, write_json
from meshwright.base.records.attempt_files import read_text
from meshwright.base.records.heartbeat import process_start
from meshwright.errors import ConfigError

RUN_FOLDER, LOG_FILE, JOB_FILE, ENDED_FILE = "run", "job.log", "job.json", "ended.json"
LIMIT_SECONDS = 300.0
"""Seconds after which a job ends, whatever it does."""
GRACE_SECONDS = 15.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"
MODULE = "meshwright_practice.incidents.launcher"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
"""The first signal stops the ranks after a checkpoint, the second one kills them."""
MAX_FOLDERS = 9999

Status = Literal["running", "ended", "killed", "missing"]


@dataclass(frozen=True)
class JobState:
    """What is known about a job."""

    status: Status
    pid: int = 0
    started: float = 0.0
    outcome: str = ""
    """complete, failed or stopped, once it has ended"""
    exit_code: int = 0
    message: str = ""

    @property
    def sentence(self) -> str:
        if self.status == "running":
            return f"the job runs (pid {self.pid})"
        if self.status == "missing":
            return "the folder of the job is gone"
        if self.status == "killed":
            return "the job was killed: its process is gone and has not recorded how it ended"
        return f"the job has ended: {self.outcome}, exit code {self.exit_code}"


def incidents_home() -> Path:
    return meshwright_home().absolute() / "practice" / "incidents"


def incident_folder(name: str) -> Path:
    return incidents_home() / name


def create_folder() -> Path:
    """Creates the folder of the next incident."""
    home = incidents_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.name) for path in home.iterdir() if path.name.isdigit() and len(path.name) == 4]
        for number in range(max(numbers, default=0) + 1, MAX_FOLDERS + 1):
            folder = home / f"{number:04d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another command has just created it
                continue
            return folder
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be created or written: {error.strerror}",
            "try to set MESHWRIGHT_HOME to a folder that is writable and has space",
        ) from None
    raise ConfigError(f"{home} has {MAX_FOLDERS:,} incidents", "try to delete old ones")


def start_job(folder: Path) -> JobState:
    """Starts the job of an incident in the background, detached from this terminal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT_FAULT")}
    # The job runs in another folder.
    environment |= {"OMP_NUM_THREADS": "1", "MESHWRIGHT_HOME": str(meshwright_home().absolute())}
    try:
        with open(folder / LOG_FILE, "xb") as log:
            process = start_python(
                MODULE,
                str(folder),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        record = {"pid": process.pid, "start": process_start(process.pid), "boot": read_text(BOOT_ID)}
        write_json(folder / JOB_FILE, record | {"started": time.time()})
    except OSError as error:
        raise ConfigError(
            f"the job cannot be started in {folder}: {error.strerror}", "try to free space on the disk"
        ) from None
    return read_job(folder)


def read_job(folder: Path) -> JobState:
    """The state of the job in a folder, from its records and its process. Never raises for a damaged record."""
    if not folder.is_dir():
        return JobState("missing")
    job, ended = read_record(folder / JOB_FILE), read_record(folder / ENDED_FILE)
    pid, started = integer(job.get("pid")), job.get("started")
    started = float(started) if isinstance(started, int | float) else 0.0
    if ended:
        outcome, message = str(ended.get("outcome", ""))[:20], str(ended.get("message", ""))[:2000]
        return JobState("ended", pid, started, outcome, integer(ended.get("exit_code")), message)
    return JobState("running" if is_running(job) else "killed", pid, started)


def is_running(job: dict[str, Any]) -> bool:
    pid, start = integer(job.get("pid")), integer(job.get("start"))
    return pid > 1 and start > 0 and job.get("boot") == read_text(BOOT_ID) and process_start(pid) == start


def integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def read_record(path: Path) -> dict[str, Any]:
    """A small JSON object; empty if it is absent or damaged."""
    try:
        value = read_json(path, "a record of an incident")
    except ConfigError:
        return {}
    return value if isinstance(value, dict) else {}


def stop_job(folder: Path, seconds: float = GRACE_SECONDS) -> JobState:
    """Stops the job, by force if it does not stop by itself. The ranks end with their launcher."""
    for number in STOP_SIGNALS:
        state = read_job(folder)
        if state.status != "running":
            return state
        os.kill(state.pid, number)
        os.kill(state.pid, signal.SIGCONT)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and is_running(read_record(folder / JOB_FILE)):
            time.sleep(0.1)
    return read_job(folder)
