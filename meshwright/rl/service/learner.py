"""The learner's connection to the rollout service: begins an attempt, publishes versions, and waits for batches."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, MeshwrightError
from meshwright.framing import receive, send
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
            connection.connect(str(address))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise MeshwrightError(f"the rollout service does not answer: {error.strerror}") from None
            time.sleep(RETRY_SECONDS)


class LearnerClient:
    """The requests of rank 0. The service answers them one after the other."""

    def __init__(self, address: Path, attempt: int, beat: Callable[[], None], notify: Callable[[str], None]) -> None:
        """`beat` is called while generators make progress, and `notify` with what went wrong in the service."""
        self.attempt, self.beat, self.notify = attempt, beat, notify
        self.connection = connect(address)
        self.connection.settimeout(ANSWER_SECONDS)

    def begin(self, run: str, cursor: dict[str, Any] | None, step: int) -> PolicyLineage:
        """Begins the attempt at `step`, with the cursor of the checkpoint that it resumes from."""
        answer = self._ask({"call": "begin", "run": run, "cursor": cursor, "step": step})
        return PolicyLineage.from_json(answer["lineage"])

    def publish(self, version: PolicyVersion, digest: str) -> list[PolicyVersion]:
        """Announces a published policy with its digest, and returns the versions that generators may still need."""
        answer = self._ask({"call": "publish", "version": version.to_json(), "digest": digest})
        return [PolicyVersion.from_json(value) for value in answer["needed"]]

    def batch(self, step: int) -> dict[str, Any]:
        """Waits for the batch of a step."""
        return self._ask({"call": "batch", "step": step})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        progress = -1
        try:
            send(self.connection, request | {"attempt": self.attempt})
            while True:
                answer, _ = receive(self.connection)
                for problem in answer.get("problems", ()):
                    self.notify(problem)
                if "waiting" not in answer:
                    break
                if answer["waiting"] != progress:
                    progress = answer["waiting"]
                    self.beat()
        except OSError as error:
            raise MeshwrightError(f"the rollout service has ended or does not answer: {error}") from None
        if "error" in answer:
            message, hint = answer["error"]
            raise DataError(message, hint)
        return answer

    def close(self) -> None:
        self.connection.close()
