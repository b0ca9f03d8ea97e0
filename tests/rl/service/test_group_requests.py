"""The groups of one request of a generator: its share of a step, sent one by one, and again if the log is full."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from meshwright.base.framing import receive, send
from meshwright.errors import CheckpointError
from meshwright.rl.queue.step_batch import Assignment
from meshwright.rl.service import generator_process
from meshwright.rl.service.generator_process import generate_groups
from meshwright.rl.service.server import MAX_GROUPS, Client, RolloutServer
from meshwright.rl.version import PolicyLineage, PolicyVersion

VERSION = PolicyVersion(1, 0)


class FakeGenerator:
    """Generates the number of a group as its content, after what was sent before has arrived."""

    def __init__(self, service: socket.socket, missing: int | None = None) -> None:
        self.service, self.missing = service, missing
        self.arrived: list[str] = []
        self.generated = 0

    def generate(self, assignment):
        assert assignment["run"] == "run"
        if self.generated:
            header, content = receive(self.service)
            self.arrived.append(f"{header['call']} {bytes(content).decode()}")
        self.generated += 1
        if assignment["group"] == self.missing:
            raise CheckpointError("no policy")
        number = assignment["group"]
        return SimpleNamespace(group=number, encode=lambda: str(number).encode())


@pytest.fixture
def ends():
    with ExitStack() as stack:
        yield [stack.enter_context(end) for end in socket.socketpair()]


def answer(*groups: int) -> dict:
    return {"run": "run", "reference": [1, 0], "groups": [{"group": group} for group in groups]}


def test_group_is_sent_before_the_next_is_generated(ends):
    own, service = ends
    generator = FakeGenerator(service)
    for group in (3, 4):
        send(service, {"verdict": "accepted", "group": group})
    generate_groups(generator, own, answer(3, 4))
    assert generator.arrived == ["group 3"]
    assert bytes(receive(service)[1]) == b"4"


def test_only_groups_that_could_not_be_written_are_sent_again(ends, monkeypatch):
    monkeypatch.setattr(generator_process, "RETRY_SECONDS", 0.0)
    own, service = ends
    generator = FakeGenerator(service)
    for group, verdict in ((1, "accepted"), (2, "retry"), (3, "duplicate"), (2, "accepted")):
        send(service, {"verdict": verdict, "group": group})
    generate_groups(generator, own, answer(1, 2, 3))
    assert [bytes(receive(service)[1]) for _ in range(2)] == [b"3", b"2"]


def test_groups_before_an_unavailable_policy_are_acknowledged(ends, monkeypatch):
    monkeypatch.setattr(generator_process, "RETRY_SECONDS", 0.0)
    own, service = ends
    generator = FakeGenerator(service, missing=2)
    send(service, {"verdict": "accepted", "group": 1})
    generate_groups(generator, own, answer(1, 2, 3))
    assert generator.arrived == ["group 1"]
    assert receive(service)[0]["call"] == "unavailable"
    own.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        own.recv(1)


@pytest.mark.parametrize(
    ("groups_per_step", "generators", "shares"), [(6, 1, [6]), (6, 2, [3, 3]), (5, 2, [3, 3]), (100, 1, [MAX_GROUPS])]
)
def test_request_is_answered_with_the_share_of_a_step(groups_per_step, generators, shares):
    numbers = iter(range(1000))
    server = RolloutServer(SimpleNamespace(groups_per_step=groups_per_step))
    server.queue = SimpleNamespace(
        assign=lambda _: Assignment(next(numbers), VERSION, 0), lineage=PolicyLineage.begin(1), release=lambda _: []
    )
    with ExitStack() as stack:
        ends = []
        for index in range(generators):
            own, other = (stack.enter_context(end) for end in socket.socketpair())
            server.clients[own.fileno()] = Client(own, generator=f"generator {index}", pending={}, since=1.0 + index)
            ends.append(other)
        server._assign()
        received = [receive(end)[0]["groups"] for end in ends]
    assert [len(groups) for groups in received] == shares
    assert [group["group"] for groups in received for group in groups] == list(range(sum(shares)))
