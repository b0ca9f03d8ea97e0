"""The process that forks reward workers, gives them groups, and ends those that fail. Torch-free.

It is forked from a generator before the generator loads its model, and never runs a user's code. So it can fork a new
worker at any time, and a worker that hangs, even one that holds the global interpreter lock, cannot block it.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from meshwright.rl.child_process import ChildProcess, describe_status, fork_child, limit_memory
from meshwright.rl.rewards.messages import (
    LENGTH,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    InvalidMessage,
    encode_message,
    receive_content,
    receive_message,
    send_message,
)
from meshwright.rl.rewards.reward_function import RewardFunction, describe_failure, reward_of, takes_tokens

EXIT_SECONDS = 0.3
"""How long the end of a worker is waited for; it is killed then, and if that takes longer, it is waited for later."""
KILL_SECONDS = 5.0
"""How long the end of a killed worker is waited for, where its status says how it ended."""
PROGRESS = struct.Struct("<q")

Message = dict[str, Any]


class RewardServer:
    """Serves the groups of one generator, one after the other.

    Args:
        channel: the channel to the generator.
        reward: the reward function.
        memory: bytes that a worker may allocate; 0: no limit.
    """

    def __init__(self, channel: socket.socket, reward: RewardFunction, memory: int) -> None:
        self.channel, self.reward, self.memory = channel, reward, memory
        self.progress = mmap.mmap(-1, PROGRESS.size)
        """the index of the completion that the worker is at, in memory that it shares"""
        self.ended: list[ChildProcess] = []
        """killed workers that have not been waited for"""
        gc.freeze()  # or the garbage collection of every worker would copy the memory that it shares
        self.worker = self._fork()

    def serve(self) -> None:
        """Answers until the generator closes the channel."""
        while (request := receive_message(self.channel, MAX_REQUEST_BYTES)) is not None:
            group = receive_content(self.channel, MAX_REQUEST_BYTES)
            if group is None:
                break
            if (status := self.worker.wait()) is not None:
                how = describe_status(status)
                print(f"meshwright: the reward worker {how} between two groups", file=sys.stderr, flush=True)
                self._replace()
            reply = self.score(request, group)
            send_message(self.channel, encode_message(reply | {"id": request["id"]}, MAX_REPLY_BYTES))
            if "failure" in reply:  # its state is not known
                self._replace()
        self.worker.kill(EXIT_SECONDS)

    def score(self, request: Message, group: bytes) -> Message:
        """The rewards of a group, or why it has none. The group is given to one worker, once."""
        deadline = time.monotonic() + request["timeout"]
        self._set_progress(0)
        try:
            send_message(self.worker.channel, LENGTH.pack(len(group)) + group, deadline)
            reply = receive_message(self.worker.channel, MAX_REPLY_BYTES, deadline)
        except TimeoutError:
            return self._failed(f"the reward took longer than {request['timeout']:g} s (rl.reward_timeout)")
        except InvalidMessage as error:
            return self._failed(f"the reward worker sent {error}")
        except OSError:
            reply = None
        if reply is None:
            return self._failed(f"the process of the reward {describe_status(self._status())}")
        if isinstance(failure := reply.get("failure"), str):
            return {"failure": failure}
        rewards = reply.get("rewards")
        if reply.get("id") != request["id"] or not are_rewards(rewards, request["completions"]):
            return self._failed("the reward worker sent something that is not the rewards of this group")
        return {"rewards": rewards}

    def _failed(self, text: str) -> Message:
        (index,) = PROGRESS.unpack(self.progress[:])
        return {"failure": f"{text}, for completion {index} of the group"}

    def _status(self) -> int | None:
        """How a worker ended whose channel is closed; None if it lives on. The kernel closes the files of a process
        before it can be waited for. To kill one that is ending does not change how it ends.
        """
        if self.worker.wait(EXIT_SECONDS) is None:
            self.worker.kill(KILL_SECONDS)
            return None if self.worker.status == -signal.SIGKILL else self.worker.status
        return self.worker.status

    def _set_progress(self, index: int) -> None:
        self.progress[:] = PROGRESS.pack(index)

    def _replace(self) -> None:
        self.worker.kill(EXIT_SECONDS)
        self.ended = [worker for worker in (*self.ended, self.worker) if worker.wait() is None]
        self.worker = self._fork()

    def _fork(self) -> ChildProcess:
        return fork_child(self._work)

    def _work(self, channel: socket.socket) -> None:
        """The worker: scores groups until the channel is closed."""
        self.channel.close()
        limit_memory(self.memory)
        for number in (signal.SIGTERM, signal.SIGHUP):  # processes that the function starts inherit what is ignored
            signal.signal(number, signal.SIG_DFL)
        with_tokens = takes_tokens(self.reward)
        while (request := receive_message(channel, MAX_REQUEST_BYTES)) is not None:
            reply = self._score_group(request, with_tokens)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            send_message(channel, encode_message(reply | {"id": request["id"]}, MAX_REPLY_BYTES))
        os._exit(0)

    def _score_group(self, request: Message, with_tokens: bool) -> Message:
        rewards = []
        for index, (text, tokens) in enumerate(request["completions"]):
            self._set_progress(index)
            try:
                rewards.append(reward_of(self.reward, request["item"], text, tokens, with_tokens))
            except BaseException as error:  # noqa: BLE001  also SystemExit and KeyboardInterrupt of a user's function
                return {"failure": describe_failure(error, index)}
        return {"rewards": rewards}


def are_rewards(values: Any, count: int) -> bool:
    """Whether a value is a list of this many finite numbers."""
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, float) and math.isfinite(value) for value in values)
