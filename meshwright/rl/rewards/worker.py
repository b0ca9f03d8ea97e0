"""The reward worker of a generator: scores groups in a process of its own, within a time limit. Torch-free."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.rl.child_process import ChildProcess, describe_status, fork_child
from meshwright.rl.rewards.messages import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    InvalidMessage,
    encode_message,
    receive_message,
    send_message,
)
from meshwright.rl.rewards.reward_function import RewardFunction, takes_tokens
from meshwright.rl.rewards.reward_server import RewardServer, are_rewards

REPLY_SECONDS = 0.7
"""How long a reply may take after the time limit of a group; with the kill below it stays under a second."""
KILL_SECONDS = 0.2
CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class CompletionText:
    """A completion of a prompt."""

    text: str
    """without the end token"""
    tokens: Sequence[int]


@dataclass(frozen=True)
class RewardFailure:
    """Why a group has no rewards: cause, and where it is known the completion."""

    text: str


class RewardWorker:
    """Calls a reward function in a process of its own, one group at a time.

    A generator makes it before it loads a model or opens a connection, because the processes are forked: this process
    forks a server, which forks the worker. A group is scored at most once. After a failure, the server kills the worker
    with all processes of its process group, and the next group has a new worker, whose state is that of the reward
    function at the start. What the function prints goes to the standard output of this process. All processes end with
    the thread that makes this object, also if it is killed.

    Args:
        reward: `fn(item, completion)` or `fn(item, completion, tokens)`, which returns a finite number.
        memory: bytes of address space that the worker may allocate, above what it has when it starts; an allocation
            beyond them raises MemoryError in the reward. 0: no limit. A reward that uses CUDA, or maps large files,
            needs more address space than memory.
    """

    def __init__(self, reward: RewardFunction, memory: int = 0) -> None:
        self.with_tokens = takes_tokens(reward)
        self.reward, self.memory = reward, memory
        self.groups = 0
        self._server: ChildProcess | None = self._fork()

    def score(
        self, item: Mapping[str, Any], completions: Sequence[CompletionText], timeout: float
    ) -> list[float] | RewardFailure:
        """The reward of every completion of a group, or why there is none. Returns within `timeout` and a second."""
        deadline = time.monotonic() + timeout + REPLY_SECONDS
        self.groups += 1
        request = {"id": self.groups, "completions": len(completions), "timeout": timeout}
        pairs = [(completion.text, self._tokens(completion)) for completion in completions]
        group = {"id": self.groups, "item": dict(item), "completions": pairs}
        try:
            content = encode_message(request, MAX_REQUEST_BYTES) + encode_message(group, MAX_REQUEST_BYTES)
        except (InvalidMessage, TypeError, ValueError) as error:
            return RewardFailure(f"the group cannot be sent to the reward worker: {error}")
        if self._server is None or self._server.wait() is not None:
            self._server = self._fork()
        server = self._server
        try:
            send_message(server.channel, content, deadline)
            reply = receive_message(server.channel, MAX_REPLY_BYTES, deadline)
        except TimeoutError:
            self._drop(server)
            return RewardFailure(f"the reward did not end within {timeout:g} s (rl.reward_timeout)")
        except (InvalidMessage, OSError):
            reply = None
        if reply is not None and reply.get("id") == self.groups:
            rewards: Any = reply.get("rewards")
            if are_rewards(rewards, len(completions)):
                return list(rewards)
            return RewardFailure(str(reply.get("failure")))
        status = server.wait(KILL_SECONDS)
        self._drop(server)
        return RewardFailure(f"the process that forks reward workers {describe_status(status)}")

    def close(self) -> None:
        """Ends the processes. Those of a killed generator end by themselves."""
        if (server := self._server) is not None:
            self._server = None
            server.channel.close()  # the server kills its worker, and exits
            server.wait(CLOSE_SECONDS)
            server.kill(CLOSE_SECONDS)

    def __enter__(self) -> RewardWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens(self, completion: CompletionText) -> list[int]:
        """The token ids, if the function takes them."""
        return [int(token) for token in completion.tokens] if self.with_tokens else []

    def _drop(self, server: ChildProcess) -> None:
        self._server = None
        server.kill(KILL_SECONDS)

    def _fork(self) -> ChildProcess:
        return fork_child(self._serve)

    def _serve(self, channel: socket.socket) -> None:
        RewardServer(channel, self.reward, self.memory).serve()
