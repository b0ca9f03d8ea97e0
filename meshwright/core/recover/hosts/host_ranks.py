"""The ranks of an attempt on all hosts, as the supervisor that leads the job sees them. Torch-free."""

from __future__ import annotations

import os
import queue
from contextlib import suppress
from dataclasses import replace
from typing import Any

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.failures import FINAL_EXIT_CODES, HOST_LOST, AttemptResized, Failure, RanksFailed
from meshwright.base.records.heartbeat import HeartbeatReading
from meshwright.base.records.incidents import read_heartbeats
from meshwright.core.channel import ChannelError, Connection
from meshwright.core.recover.hosts.leader import Ended, HostsPolicy, Leader
from meshwright.core.recover.hosts.local_ranks import LocalRanks, failure_of_host
from meshwright.core.recover.hosts.member import Member
from meshwright.core.recover.hosts.messages import Message, encode_message
from meshwright.core.recover.hosts.rank_readings import decode_readings
from meshwright.errors import MeshwrightError, PeerError, StoppedBySignal

POLL_SECONDS = 0.05
CHECKPOINT_POLL_SECONDS = 1.0
"""Interval at which a job on fewer hosts looks for a checkpoint at which it can grow."""
Inbox = queue.SimpleQueue[tuple[Connection, Message | None, float]]
"""Messages of other hosts, each with its connection and the time of its arrival; None: the connection has ended."""


class HostsMissing(PeerError):
    """An attempt cannot start, because too few hosts have joined."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "try to start a supervisor on every host of the job")


class HostRanks:
    """Leads the hosts of a job. After `start` it represents the ranks of that attempt (`RunningRanks`)."""

    def __init__(
        self, policy: HostsPolicy, member: Member, local: LocalRanks, inbox: Inbox, received: list[int]
    ) -> None:
        self.clock = local.clock
        self.leader, self.member, self.local = Leader(policy, member.host), member, local
        self.inbox, self.received = inbox, received
        self.connections: dict[str, Connection] = {}
        self.names: dict[Connection, str] = {}
        self.next_look, self.checkpointed = 0.0, False
        member.join(self.clock())

    @property
    def launcher_pid(self) -> int:
        return os.getpid()

    def start(self, attempt: int, restart: int) -> HostRanks:
        self.checkpointed = False
        if (own := self.leader.hosts.get(self.member.host)) is not None:
            # Each attempt has a port of its own: ranks of an earlier one that still connect must not find this one.
            own.port = self.member.free_port()
        self.leader.begin(attempt, restart, self.clock())
        return self

    def poll(self, seconds: float) -> bool:
        """Handles messages for at most `seconds`; True once the attempt has ended on every host."""
        deadline = self.clock() + seconds
        while True:
            self._receive(min(POLL_SECONDS, max(0.0, deadline - self.clock())))
            self._advance(self.clock())
            if self.leader.is_complete and self.local.running is None:
                return True
            if self.clock() >= deadline:
                return False

    def _receive(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._handle(*self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait())
            while True:
                self._handle(*self.inbox.get_nowait())

    def _handle(self, connection: Connection, message: Message | None, now: float) -> None:
        name = self.names.get(connection)
        if message is None:
            if name is not None and self.connections.get(name) is connection:
                self._forget(name)
                self.leader.lose(name, "its connection has ended", now)
        elif message["kind"] == "join":
            self._join(connection, message, now)
        elif name is None or name not in self.leader.hosts:
            connection.close()
        elif message["kind"] == "signal":
            # An engine signals every host: the same request from another host is not a second one.
            self.received.extend([message["signal"]] if not self.received else [])
        else:
            self.leader.receive(name, message, now)

    def _join(self, connection: Connection, message: Message, now: float) -> None:
        if refusal := self.leader.join(message, now):
            self._send(connection, {"kind": "refuse", "reason": refusal})
            connection.close()
            return
        self._forget(message["host"])
        self.connections[message["host"]], self.names[connection] = connection, message["host"]

    def _forget(self, name: str) -> None:
        if (connection := self.connections.pop(name, None)) is not None:
            self.names.pop(connection, None)
            connection.close()

    def _advance(self, now: float) -> None:
        self.local.drive(self.member)
        self.member.tick(now, dict)  # the ranks of this host are read from its own files
        for message in take(self.member.outbox):
            if message["kind"] == "join":
                self.leader.join(message, now)
            else:
                self.leader.receive(self.member.host, message, now)
        self._look_for_checkpoint(now)
        self.leader.tick(now, self.checkpointed)
        for name in self.connections.keys() - self.leader.hosts.keys():
            self._forget(name)
        self.flush()

    def flush(self) -> None:
        """Sends the messages of the leader."""
        for name, message in take(self.leader.outbox):
            if name == self.member.host:
                self.member.receive(message)
            elif name in self.connections:
                self._send(self.connections[name], message)

    def _send(self, connection: Connection, message: Message) -> None:
        with suppress(ChannelError):  # the thread that receives reports the end of the connection
            connection.send(encode_message(message))

    def _look_for_checkpoint(self, now: float) -> None:
        if not self.checkpointed and self.leader.can_grow and now >= self.next_look:
            self.next_look = now + CHECKPOINT_POLL_SECONDS
            self.checkpointed = self._has_checkpoint()

    def _has_checkpoint(self) -> bool:
        newest = next(iter(list_published(open_run_store(self.local.folder))), None)
        return newest is not None and newest.attempt == self.leader.attempt

    def signal(self, number: int) -> None:
        self.leader.stop(number)
        self.poll(0.0)  # messages first: this process may have been busy for longer than a host may be silent

    def kill(self) -> None:
        """Ends the ranks of all hosts, and waits for that as long as for a lost host."""
        self.leader.kill(self.clock())
        self.poll(self.leader.policy.host_timeout)
        self.local.end()

    def kill_rank(self, rank: int) -> None:
        self.leader.kill_rank(rank)
        self.poll(0.0)

    def read_heartbeats(self) -> dict[int, HeartbeatReading]:
        """The heartbeats of all ranks: this host's from its files, the others' from their last beats."""
        started, readings = self.local.started, {}
        if started is not None and started.attempt == self.leader.attempt:
            own = started.placement.local_ranks
            found = read_heartbeats(self.local.folder, self.leader.attempt)
            readings = {rank: reading for rank, reading in found.items() if rank in own}
        for name in self.leader.placed:
            if name != self.member.host and name in self.leader.hosts:
                readings |= decode_readings(name, self.leader.hosts[name].ranks)
        if self.leader.resizing:  # the leader itself has signalled the ranks: nobody has asked the job to stop
            readings = {rank: replace(reading, signal=0) for rank, reading in readings.items()}
        return dict(sorted(readings.items()))

    def results(self) -> list[Any]:
        """The summary of rank 0; raises RanksFailed, AttemptResized, or why the attempt did not start."""
        leader = self.leader
        if leader.failure:
            raise HostsMissing(leader.failure)
        ended = [leader.ended[name] for name in leader.placed]
        for end in ended:
            if "error" in end.outcome and ends_job(end.outcome["error"]["exit_code"]):
                raise RanksFailed([failure_of_host(end.host, end.outcome["error"], end.time)]).cause()
        failures = [failure for end in ended for failure in self._failures(end)]
        if not failures:
            return [ended[0].outcome["summary"]]
        if leader.resizing and all(f.error_type == StoppedBySignal.__name__ or f.secondary for f in failures):
            raise AttemptResized(len(leader.placed), leader.policy.hosts)
        failed = RanksFailed(failures)
        if failed.first.error_type != HOST_LOST:  # the leader has counted lost hosts
            leader.blames[failed.first.host] += 1
        raise failed

    def _failures(self, ended: Ended) -> list[Failure]:
        if not ended.lost:
            # An error kept the ranks of this host from starting: another host may do better.
            errors = [ended.outcome["error"]] if "error" in ended.outcome else ended.outcome.get("failures", [])
            return [failure_of_host(ended.host, values, ended.time) for values in errors]
        per_host = self.leader.policy.ranks_per_host
        first = self.leader.placed.index(ended.host) * per_host
        ranks = f"rank {first}" if per_host == 1 else f"ranks {first} to {first + per_host - 1}"
        message = f"host {ended.host} ({ranks}) is lost: {ended.lost}"
        return [Failure(first, HOST_LOST, message, 8, ended.time, host=ended.host)]

    def leave(self, error: BaseException | None, summary: Message) -> None:
        """Tells every host how the job has ended."""
        exit_code = 0 if error is None else error.exit_code if isinstance(error, MeshwrightError) else 1
        reason = "" if error is None else str(error) or type(error).__name__
        self.leader.exit(exit_code, reason[:4096], summary)
        self.flush()
        for connection in self.connections.values():
            connection.close()


def ends_job(exit_code: int) -> bool:
    """Whether an error that kept ranks from starting would do so on every host, or is a signal."""
    return exit_code in FINAL_EXIT_CODES or exit_code > 128


def take(items: list[Any]) -> list[Any]:
    """Empties a list and returns what it had."""
    taken, items[:] = list(items), []
    return taken
