"""The rollout service: a process beside the ranks that outlives their attempts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import socket

from meshwright.core import faults
from meshwright.rl.child_process import ChildProcess, fork_child
from meshwright.rl.service.generator_pool import GeneratorPool, redirect_output
from meshwright.rl.service.generator_process import run_generator
from meshwright.rl.service.learner import answers
from meshwright.rl.service.server import RolloutServer
from meshwright.rl.service.setup import RolloutSetup

ANSWER_SECONDS = 10.0
"""How long a service that runs may take to answer when another attempt starts."""


class RolloutService:
    """The service as the process sees it that forks the ranks. It is forked when the first attempt starts, and again
    if it has ended.
    """

    def __init__(self, setup: RolloutSetup, remove_folder: Callable[[], object] = lambda: None) -> None:
        """`remove_folder` removes the folder of the socket when the service has ended."""
        self.setup, self.remove_folder = setup, remove_folder
        self.process: ChildProcess | None = None
        self.starts = 0

    @property
    def address(self) -> Path:
        return self.setup.address

    def ensure_running(self) -> None:
        """Forks the service unless it runs. One that does not answer, for example because it is stopped, is replaced:
        what it has acknowledged is in the log.
        """
        if self.process is not None and self.process.wait() is None:
            if answers(self.setup.address, ANSWER_SECONDS):
                return
            self.process.kill(ANSWER_SECONDS)
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
        self.remove_folder()


def serve(setup: RolloutSetup, folder: Path, _channel: socket) -> None:
    """Serves until the process is killed."""
    rl = setup.config.rl
    pool = GeneratorPool(rl.generators, rl.generator_timeout, folder, partial(run_generator, setup))
    server = RolloutServer(setup, pool.watch)
    server.listen()
    while True:
        server.turn()
