"""The server of rollouts with clients that send garbage, too much, too late, or for another attempt."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshwright.base.framing import LENGTHS, MAX_HEADER_BYTES, receive, send
from meshwright.base.records.run_folder import RunFolder
from meshwright.rl.queue.settings import QueueSettings
from meshwright.rl.rollout import Rollout, RolloutGroup
from meshwright.rl.service import server as server_module
from meshwright.rl.service.server import MAX_GROUP_BYTES, RolloutServer
from meshwright.rl.service.setup import RolloutSetup
from meshwright.rl.version import PolicyVersion
from tests.rl.rl_runs import rl_config


class ServedQueue:
    """A server whose turns the test takes, so that nothing depends on time."""

    def __init__(self, server: RolloutServer) -> None:
        self.server = server

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(str(self.server.setup.address))
        self.turn()
        return client

    def turn(self) -> None:
        for _ in range(3):
            self.server.turn(0.01)

    def ask(self, client: socket.socket, content: bytes = b"", **request: Any) -> dict[str, Any]:
        send(client, request, content)
        self.turn()
        return receive(client)[0]

    def begin(self, attempt: int = 1) -> socket.socket:
        learner = self.connect()
        answer = self.ask(learner, call="begin", run="r", cursor=None, step=0, fork=False, attempt=attempt)
        assert answer["lineage"]["timeline"] == attempt
        return learner

    def publish(self, learner: socket.socket, attempt: int = 1, step: int = 0) -> dict[str, Any]:
        return self.ask(learner, call="publish", version=[attempt, step], digest="d", attempt=attempt)

    def generator(self, name: str = "g") -> socket.socket:
        client = self.connect()
        send(client, {"call": "hello", "generator": name})
        return client


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedQueue]:
    with tempfile.TemporaryDirectory() as short:
        folder = tmp_path / "run"
        folder.mkdir()
        setup = SimpleNamespace(
            address=Path(short) / "s",
            config=rl_config(),
            folder=RunFolder(folder),
            queue_settings=lambda: QueueSettings(2, 1),
            groups_per_step=1,
            vocab=0,
            prompt_id=lambda group: group + 100,
        )
        server = RolloutServer(cast("RolloutSetup", setup))
        server.listen()
        yield ServedQueue(server)
        for client in list(server.clients.values()):
            server.disconnect(client)
        server.listener.close()
        server.selector.close()
        if server.log is not None:
            server.log.close()


def group(number: int, version: PolicyVersion, generator: str = "g") -> bytes:
    rollouts = tuple(
        Rollout(np.array([1], np.int32), np.zeros(1), np.zeros(1), np.zeros(0), float(reward)) for reward in range(2)
    )
    return RolloutGroup(number, number + 100, version, np.array([2], np.int32), rollouts, generator).encode()


BAD_MESSAGES = {
    "content that is too long": LENGTHS.pack(2, MAX_GROUP_BYTES + 1) + b"{}",
    "a header that is too long": LENGTHS.pack(MAX_HEADER_BYTES + 1, 0),
    "not JSON": LENGTHS.pack(3, 0) + b"{{{",
    "not a record": LENGTHS.pack(2, 0) + b"[]",
    "nested too deeply": LENGTHS.pack(200_000, 0) + b"[" * 200_000,
    "no call": LENGTHS.pack(2, 0) + b"{}",
    "a batch before an attempt": LENGTHS.pack(36, 0) + b'{"call":"batch","attempt":1,"step":1}'[:36],
    "an infinite attempt": LENGTHS.pack(35, 0) + b'{"call":"begin","attempt":Infinity}',
    "a cursor that is none": LENGTHS.pack(
        len(
            CURSOR := json.dumps(
                {"call": "begin", "attempt": 1, "run": "r", "cursor": [1], "step": 0, "fork": False}
            ).encode()
        ),
        0,
    )
    + CURSOR,
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_client_that_sends_garbage_is_disconnected_and_the_others_are_served(served: ServedQueue, name: str) -> None:
    learner = served.begin()
    bad = served.connect()
    bad.sendall(BAD_MESSAGES[name])
    served.turn()
    assert bad.recv(1) == b""
    assert served.publish(learner)["needed"] == [[1, 0]]


def test_a_request_that_the_queue_refuses_is_answered_with_its_error(served: ServedQueue) -> None:
    """A publication out of order must not end the service."""
    learner = served.begin()
    assert "publishes policy version 1.5" in served.publish(learner, step=5)["error"][0]
    assert served.publish(learner)["needed"] == [[1, 0]]
    assert "asks for the batch of step 3" in served.ask(learner, call="batch", step=3, attempt=1)["error"][0]


def test_the_learner_of_an_earlier_attempt_is_disconnected(served: ServedQueue) -> None:
    first = served.begin()
    served.publish(first)
    send(first, {"call": "batch", "step": 0, "attempt": 1})
    served.turn()
    served.begin(attempt=2)
    received = b""
    while block := first.recv(1 << 16):
        received += block
    assert b"groups" not in received
    stale = served.connect()
    send(stale, {"call": "publish", "version": [1, 0], "digest": "d", "attempt": 1})
    served.turn()
    assert stale.recv(1) == b""


def test_a_group_of_another_generator_is_refused_and_its_own_is_accepted(served: ServedQueue) -> None:
    learner = served.begin()
    served.publish(learner)
    honest, liar = served.generator("g"), served.generator("h")
    (assignment,) = served.ask(honest, call="assign")["groups"]
    assert (assignment["group"], assignment["prompt_id"], assignment["version"]) == (0, 100, [1, 0])
    send(liar, {"call": "group"}, group(0, PolicyVersion(1, 0), "g"))
    served.turn()
    assert liar.recv(1) == b""
    assert served.ask(honest, group(0, PolicyVersion(1, 0)), call="group") == {"verdict": "accepted", "group": 0}
    batch = served.ask(learner, call="batch", step=0, attempt=1)
    assert [entry["group"] for entry in batch["groups"]] == [0]
    assert any("was disconnected: a group of 'g'" in problem for problem in batch["problems"])


def test_a_generator_with_a_policy_of_a_lost_timeline_gets_the_new_one(served: ServedQueue) -> None:
    """Its record is kept and counted, and its next assignment names the version that it must load."""
    learner = served.begin()
    served.publish(learner)
    generator = served.generator()
    assert served.ask(generator, call="assign")["groups"][0]["version"] == [1, 0]
    learner = served.begin(attempt=2)
    served.publish(learner, attempt=2)
    assert served.ask(generator, group(0, PolicyVersion(1, 0)), call="group") == {
        "verdict": "lost_timeline",
        "group": 0,
    }
    assert served.ask(generator, call="assign")["groups"][0]["version"] == [2, 0]


def test_a_policy_that_no_generator_can_load_ends_the_wait_of_the_learner(served: ServedQueue) -> None:
    learner = served.begin()
    served.publish(learner)
    send(learner, {"call": "batch", "step": 0, "attempt": 1})
    generator = served.generator()
    for _ in range(server_module.MAX_UNAVAILABLE):
        assert served.ask(generator, call="assign")["groups"][0]["group"] == 0
        send(generator, {"call": "unavailable", "reason": "policy 1.0 is damaged"})
    served.turn()
    while "error" not in (answer := receive(learner)[0]):
        pass
    assert "10 times in a row: g: policy 1.0 is damaged" in answer["error"][0]


def test_only_generators_that_work_are_progress(served: ServedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that waits while a generator has a group does not hang; with an idle generator, or one whose time for
    the group is over, it does.
    """
    monkeypatch.setattr(server_module, "REPORT_SECONDS", 0.0)
    learner = served.begin()
    served.publish(learner)
    generator = served.generator()
    served.turn()
    before = served.server.progress
    served.turn()
    assert served.server.progress == before
    served.ask(generator, call="assign")
    before = served.server.progress
    served.turn()
    assert served.server.progress > before
    (client,) = [client for client in served.server.clients.values() if client.generator]
    client.since = time.monotonic() - served.server.setup.config.rl.generator_timeout - 1
    before = served.server.progress
    served.turn()
    assert served.server.progress == before
