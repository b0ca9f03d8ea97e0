"""Jobs whose hosts are supervisors of this machine with different names, which reach each other over loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.manifest import MANIFEST_FILE, InvalidManifest, Manifest
from meshwright.base.records.events import read_events
from meshwright.base.records.incidents import Incident, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.api.snapshot_keeper import PREFIX, SHARED_MEMORY
from tests.kit.small_run import SMALL

SECRET = "0123456789abcdef0123456789abcdef"
STEPS = 20
OPTIONS = (
    *SMALL,
    "--checkpoint.every=10",
    "--checkpoint.seconds=0",
    "--eval.every=0",
    "--numerics.compare_every=0",
    "--launch.host_timeout=15",
    "--launch.rendezvous_timeout=90",
)


class LoopbackJob:
    """Two hosts with a rank each, and any number of spares, all with the same command."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.logs = RunFolder(folder), folder.parent / "logs"
        self.logs.mkdir()
        self.command = [sys.executable, "-m", "meshwright", "train", "--run", str(folder), "--ranks", "2"]
        self.command += ["--steps", str(STEPS), "--launch.hosts=2", *OPTIONS, *options]
        self.supervisors: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, fault: str = "") -> None:
        values = {"MESHWRIGHT_JOB_SECRET": SECRET, "MESHWRIGHT_HOST_NAME": host, "MESHWRIGHT_FAULT": fault}
        values |= {"MESHWRIGHT_HOST_ADDRESS": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        with open(self.logs / f"{host}.log", "ab") as log:
            self.supervisors[host] = subprocess.Popen(self.command, env=os.environ | values, stdout=log, stderr=log)

    def kill(self, *hosts: str) -> None:
        """Kills hosts with all their processes: the ranks end with their supervisor."""
        for host in hosts:
            self.supervisors[host].send_signal(signal.SIGKILL)
        for host in hosts:
            self.supervisors.pop(host).wait()

    def finish(self, seconds: float = 150.0) -> dict[str, int]:
        """The exit code of every host."""
        deadline = time.monotonic() + seconds
        return {host: p.wait(max(1.0, deadline - time.monotonic())) for host, p in self.supervisors.items()}

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            ended = {host: p.returncode for host, p in self.supervisors.items() if p.poll() is not None}
            assert not ended, f"{ended}\n{self.all_logs()}"
            assert time.monotonic() < deadline, self.all_logs()
            time.sleep(0.05)
        return value

    def ranks_are_at(self, step: int) -> bool:
        """Whether rank 0 has completed a number of steps in the first attempt."""
        return any(event["step"] + 1 >= step for event in self.events("step"))

    def snapshots(self) -> list[int]:
        """The steps of the snapshots of this run that are in the memory of this machine, one for every host."""
        steps = []
        for path in SHARED_MEMORY.glob(f"{PREFIX}*/checkpoints/*/{MANIFEST_FILE}"):
            with suppress(OSError, InvalidManifest):  # removed meanwhile
                manifest = Manifest.decode(path.read_bytes())
                if manifest.run == json.loads(self.folder.identity_file.read_text())["run"]:
                    steps.append(manifest.step)
        return sorted(steps)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder.events(0)
        return [event for event in read_events(path) if event["kind"] == kind] if path.exists() else []

    def incidents(self) -> list[Incident]:
        return read_incidents(self.folder)

    def leader(self) -> str:
        return next(name for name in "abcd" if f"host {name} leads" in self.log(name))

    def log(self, host: str) -> str:
        path = self.logs / f"{host}.log"
        return path.read_text() if path.exists() else ""

    def all_logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.logs.iterdir()))

    def end(self) -> None:
        for process in self.supervisors.values():
            process.kill()
            process.wait()
