"""The server of reward workers, on a machine that is busy."""

from __future__ import annotations

import ctypes

from meshwright.rl.rewards import reward_server
from meshwright.rl.rewards.worker import CompletionText
from tests.kit.reward_processes import worker_of


def crash(item, completion):
    ctypes.string_at(0)


def test_worker_whose_end_takes_longer_than_its_channel_is_named_by_its_signal(monkeypatch):
    """The kernel closes the files of a process before its parent can wait for it: on a busy machine, long before."""
    monkeypatch.setattr(reward_server, "EXIT_SECONDS", 0.0)
    with worker_of(crash) as worker:
        for _ in range(5):
            assert "was killed by signal 11" in worker.score({"prompt": ""}, [CompletionText("a", [1])], 30).text
