"""The learner's connection to the rollout service: begins an attempt, publishes versions, and waits for batches."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.base.framing import receive, send, socket_path
from meshwright.errors import DataError, MeshwrightError, PeerError
from meshwright.rl.version import PolicyLineage, PolicyVersion

CONNECT_SECONDS = 60.0
RETRY_SECONDS = 0.02
ANSWER_SECONDS = 60.0
"""The service sends a message at least this often while the learner waits for it."""


def connect(address: Path, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Connects to the service, which may still be starting."""
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with socket_path(address) as path:
                connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise PeerError(f"the rollout service does not answer: {error}") from None
            time.sleep(RETRY_SECONDS)


def answers(address: Path, seconds: float) -> bool:
    """Whether the service answers within so many seconds."""
    try:
        with connect(address, seconds) as connection:
            connection.settimeout(seconds)
            send(connection, {"call": "ping"})
            return bool(receive(connection)[0])
    except (OSError, MeshwrightError):
        return False


class LearnerClient:
    """The requests of rank 0. The service answers them one after the other."""

    def __init__(self, address: Path, attempt: int, beat: Callable[[], None], notify: Callable[[str], None]) -> None:
        """`beat` is called while generators make progress, and `notify` with what went wrong in the service."""
        self.attempt, self.beat, self.notify = attempt, beat, notify
        self.connection = connect(address)
        self.connection.settimeout(ANSWER_SECONDS)
        self.progress = self.asked = -1

    def begin(self, run: str, cursor: dict[str, Any] | None, step: int, fork: bool = False) -> PolicyLineage:
        """Begins the attempt at `step`, with the cursor of the checkpoint that it resumes from or forks."""
        self.connection.settimeout(None)  # the service scans the log, which may be long; the watchdog watches this rank
        answer = self._ask({"call": "begin", "run": run, "cursor": cursor, "step": step, "fork": fork})
        self.connection.settimeout(ANSWER_SECONDS)
        return PolicyLineage.from_json(answer["lineage"])

    def publish(self, version: PolicyVersion, digest: str) -> list[PolicyVersion]:
        """Announces a published policy with its digest, and returns the versions that generators may still need."""
        answer = self._ask({"call": "publish", "version": version.to_json(), "digest": digest})
        return [PolicyVersion.from_json(value) for value in answer["needed"]]

    def batch(self, step: int, seconds: float = math.inf) -> dict[str, Any] | None:
        """Waits at most this long for the batch of a step. None: it is not complete yet, and may be asked for again."""
        with self._errors():
            if self.asked != step:
                send(self.connection, {"call": "batch", "step": step, "attempt": self.attempt})
                self.asked = step
            deadline = time.monotonic() + seconds
            while (answer := self._receive()) is None:
                if time.monotonic() > deadline:
                    return None
            return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._errors():
            send(self.connection, request | {"attempt": self.attempt})
            while (answer := self._receive()) is None:
                pass
            return answer

    def _receive(self) -> dict[str, Any] | None:
        """The next answer; None for a message which says that the service still waits."""
        answer, _ = receive(self.connection)
        for problem in answer.get("problems", ()):
            self.notify(problem)
        if "error" in answer:
            message, hint = answer["error"]
            raise (MeshwrightError if answer.get("again") else DataError)(message, hint)
        if "waiting" not in answer:
            return answer
        if answer["waiting"] != self.progress:
            self.progress = answer["waiting"]
            self.beat()
        return None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PeerError(  # neither the program nor the data of the learner is the cause
                f"the rollout service has ended or does not answer: {error}", "try rollouts/service.log of the run"
            ) from None

    def close(self) -> None:
        self.connection.close()
