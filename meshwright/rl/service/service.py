"""The rollout service: a process beside the ranks that outlives their attempts."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from socket import socket

from meshwright import faults
from meshwright.rl.rewards.child_process import ChildProcess, fork_child
from meshwright.rl.service.generator_pool import GeneratorPool, redirect_output
from meshwright.rl.service.generator_process import run_generator
from meshwright.rl.service.server import RolloutServer
from meshwright.rl.service.setup import RolloutSetup


class RolloutService:
    """The service as the process sees it that forks the ranks. It is forked when the first attempt starts, and again
    if it has ended.
    """

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup
        self.process: ChildProcess | None = None
        self.starts = 0

    @property
    def address(self) -> Path:
        return self.setup.address

    def ensure_running(self) -> None:
        """Forks the service unless it runs."""
        if self.process is not None and self.process.wait() is None:
            return
        self.setup.address.unlink(missing_ok=True)
        self.process = fork_child(self._run)
        self.starts += 1

    def _run(self, channel: socket) -> None:
        folder = self.setup.folder.root / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        redirect_output(folder / "service.log")
        faults.arm(0, self.starts)
        serve(self.setup, folder, channel)

    def close(self) -> None:
        """Ends the service and its generators. What they have not written is generated again by the next job."""
        if self.process is not None:
            self.process.kill(5.0)
            self.process = None
        shutil.rmtree(self.setup.address.parent, ignore_errors=True)


def private_address() -> Path:
    """A path for a socket in a new folder that only this user can enter. Paths of sockets have at most 107 bytes, so it
    cannot be in the run folder.
    """
    return Path(tempfile.mkdtemp(prefix="meshwright-")) / "rollouts"


def serve(setup: RolloutSetup, folder: Path, _channel: socket) -> None:
    """Serves until the process is killed."""
    rl = setup.config.rl
    pool = GeneratorPool(rl.generators, rl.generator_timeout, folder, partial(run_generator, setup))
    server = RolloutServer(setup, pool.watch)
    server.listen()
    while True:
        server.turn()
