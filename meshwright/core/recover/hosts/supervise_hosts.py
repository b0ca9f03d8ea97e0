"""The supervisor of one host of a job: it leads the job while it holds the lease, and follows the leader otherwise.
Torch-free.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshwright.base.config import LaunchConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.channel import ChannelError, Connection, Listener, connect, mac
from meshwright.core.recover.hosts.election import Choice, Election, LeaseView
from meshwright.core.recover.hosts.host_ranks import POLL_SECONDS, HostRanks, HostsMissing, Inbox, take
from meshwright.core.recover.hosts.leader import HostsPolicy
from meshwright.core.recover.hosts.local_ranks import KILL_FRACTION, KILL_SECONDS, LocalLauncher, LocalRanks
from meshwright.core.recover.hosts.member import Member
from meshwright.core.recover.hosts.messages import MAX_MESSAGE_BYTES, acknowledgement, decode_message, encode_message
from meshwright.core.recover.hosts.rank_lock import is_free, lock_path
from meshwright.core.recover.lease import (
    OBJECT_STORE_OBSERVATION,
    OBSERVATION_SECONDS,
    Lease,
    host_name,
    process_token,
    raise_if_held,
    take_lease,
    view_newest_lease,
)
from meshwright.core.recover.running_ranks import StartAttempt, Viewer
from meshwright.core.recover.supervisor import received_signals, supervise, warn
from meshwright.core.store.memory.keeper import SnapshotKeeper
from meshwright.core.store.memory.session import KeeperSession, decode_hello
from meshwright.errors import BusyError, ConfigError, KilledBySignal, MeshwrightError, StoppedBeforeStart

ADDRESS_VARIABLE = "MESHWRIGHT_HOST_ADDRESS"
CONNECT_SECONDS = 2.0
SEEK_SECONDS = 0.5
"""Interval at which a host without a leader reads the newest lease."""


class JobEnded(MeshwrightError):
    """The job ended with this error on the host that leads it."""

    def __init__(self, exit_code: int, reason: str, hint: str = "") -> None:
        super().__init__(reason or "the job has ended on the host that leads it", hint)
        self.exit_code = exit_code


class SteppedBack(MeshwrightError):
    """This host could not lead, and leaves that to others for a while."""


def job_id(secret: bytes) -> str:
    """What a lease records of the job that it belongs to."""
    return mac(secret, b"job").hex()[:32]


def host_address() -> str:
    """The address at which other hosts reach this one."""
    if given := os.environ.get(ADDRESS_VARIABLE):
        return given
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"the name of this host, {socket.gethostname()}, does not resolve: {error.strerror}",
            f"try {ADDRESS_VARIABLE}=ADDRESS with the address at which other hosts reach this one",
        ) from None


def free_port(address: str) -> int:
    """A port of this host that is free at the moment."""
    with socket.socket(socket.getaddrinfo(address, None)[0][0]) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass
class HostSupervisor:
    """Leads or follows until the job has ended."""

    folder: RunFolder
    launch: LaunchConfig
    launcher: LocalLauncher
    make_viewer: Callable[[int], Viewer]
    policy: HostsPolicy
    secret: bytes
    received: list[int]
    """The signals that this supervisor has received."""
    options: dict[str, Any]
    """Further arguments of `supervise`."""
    beside: Callable[[StartAttempt], StartAttempt]
    """Starts what runs beside the ranks on the host that leads."""
    fresh: bool = False
    keeper: SnapshotKeeper | None = None
    """What this host keeps in memory for the ranks of the job."""

    def __post_init__(self) -> None:
        self.name, self.address = host_name(), host_address()
        self.token = process_token()
        self.job = job_id(self.secret)
        self.observation = OBJECT_STORE_OBSERVATION if self.folder.url else OBSERVATION_SECONDS
        self.accepted: set[Connection] = set()
        """The connections of other hosts while this one leads."""
        self.inbox: Inbox = queue.SimpleQueue()
        self.listener = Listener(self.address, self.secret, self._serve)
        # Ranks that a member gives up must be dead before the leader gives up the member.
        kill_seconds = min(KILL_SECONDS, KILL_FRACTION * self.launch.host_timeout)
        self.local = LocalRanks(self.folder, self.launcher, self.launch.hang_timeout, kill_seconds=kill_seconds)
        self.leading = self.stepped_back = False
        self.warned_of_leader = ""

    def run(self) -> Any:
        """Returns the summary of the job; raises what ended it."""
        self.election = election = Election(self.job, self.token, self.observation)
        warned = ""
        try:
            self._wait_for_earlier_ranks()
            while True:
                if self.received:
                    raise StoppedBeforeStart(self.received[0])
                try:
                    lease = view_newest_lease(self.folder)
                except OSError as error:
                    warned = self._warn_once(f"the run folder cannot be read: {error.strerror}", warned)
                    election.forget()
                    time.sleep(SEEK_SECONDS)
                    continue
                match election.decide(lease, time.monotonic()):
                    case Choice.EXIT:
                        return self._ended(lease)
                    case Choice.BUSY:
                        raise_if_held(self.folder, self.observation)
                    case Choice.TAKE:
                        if (taken := self._take(lease)) is not None:
                            try:
                                return self._lead(taken)
                            except BusyError as error:  # another host has taken over meanwhile
                                warn(f"{error.message}; this host follows it")
                            except SteppedBack as error:
                                warn(f"{error.message}; another host may lead")
                    case Choice.JOIN:
                        assert lease is not None
                        if (outcome := self._follow(lease)) is not None:
                            return outcome.get("summary") or {}
                    case Choice.WAIT:
                        holder = f" of attempt {lease.attempt}" if lease is not None else ""
                        message = f"waiting for the leader{holder}, which has ended or is silent"
                        warned = self._warn_once(message, warned)
                time.sleep(SEEK_SECONDS * (0.5 + secrets.randbelow(1000) / 1000))
        finally:
            self.local.end()
            self.listener.close()

    def _wait_for_earlier_ranks(self) -> None:
        """An earlier supervisor of this host was killed, and its ranks have not ended yet: no other ranks start."""
        warned, lock = "", lock_path(self.folder.root, self.name)
        while not is_free(lock):
            if self.received:
                raise StoppedBeforeStart(self.received[0])
            warned = self._warn_once("waiting for ranks of an earlier supervisor, which have not ended", warned)
            time.sleep(SEEK_SECONDS)

    def _warn_once(self, message: str, warned: str) -> str:
        """Warns, unless the message before was the same."""
        if message != warned:
            warn(f"host {self.name}: {message}")
        return message

    def _ended(self, lease: LeaseView | None) -> Any:
        assert lease is not None
        if lease.outcome == "complete":
            return {}
        message = f"the job with this secret has ended: attempt {lease.attempt} {lease.outcome}"
        raise JobEnded(lease.exit_code or 1, message, "try again with a new secret on every host to start a new job")

    def _take(self, lease: LeaseView | None) -> Lease | None:
        """The lease of the next attempt; None if another host has it, or the store does not answer."""
        try:
            return take_lease(self.folder, lease, self.job, f"{self.address}:{self.listener.port}", self.fresh)
        except OSError as error:
            warn(f"host {self.name} could not take the lease: {error.strerror}")
        except BusyError as error:
            warn(f"host {self.name} could not take the lease: {error.message}")
        return None

    def _member(self, *, is_leader: bool = False) -> Member:
        ports = lambda: free_port(self.address)  # noqa: E731
        port, timeout = self.listener.port, self.launch.host_timeout
        return Member(self.name, self.token, self.address, port, timeout, ports, is_leader)

    def _lead(self, lease: Lease) -> Any:
        """Runs attempts on all hosts until the job has ended."""
        self.inbox, self.leading = queue.SimpleQueue(), True
        ranks = HostRanks(self.policy, self._member(is_leader=True), self.local, self.inbox, self.received)
        warn(f"host {self.name} leads the job, waiting for {self.policy.hosts} host(s)")
        error: BaseException | None = None
        summary: Any = {}

        def start(attempt: int, restart: int) -> HostRanks:
            self._fence(attempt)
            return ranks.start(attempt, restart)

        try:
            summary = supervise(
                self.folder,
                self.launch,
                self.beside(start),
                self.make_viewer,
                lease=lease,
                received=self.received,
                **self.options,
            )
            return summary
        except HostsMissing as missing:
            error = missing
            # The other hosts may see each other: they get the chance to lead, once.
            if self.stepped_back and not ranks.leader.previous:
                raise
            self.stepped_back, error = True, SteppedBack(missing.message)
            self.election.step_back(time.monotonic())
            raise error from None
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.leading = False
            if isinstance(error, BusyError | SteppedBack):
                self._fence(ranks.leader.attempt + 1)
            else:
                ranks.leave(error, summary if isinstance(summary, dict) else {})
            for connection in list(self.accepted):  # also those that have not joined yet
                connection.close()

    def _serve(self, connection: Connection) -> None:
        """Receives the messages of another host, or the snapshots of a rank, in the thread of its connection."""
        first = connection.receive(MAX_MESSAGE_BYTES)
        if (attempt := decode_hello(first)) is not None:
            if self.keeper is not None:
                KeeperSession(self.keeper, connection, attempt).serve()
        elif self.leading:
            self.accepted.add(connection)
            try:
                receive_messages(connection, self.inbox, first)
            finally:
                self.accepted.discard(connection)

    def _fence(self, attempt: int) -> None:
        """Accepts no snapshots of attempts before this one from now on."""
        if self.keeper is not None:
            self.keeper.fence(attempt)

    def _follow(self, lease: LeaseView) -> dict[str, Any] | None:
        """Follows a leader. Returns how the job ended; None if the leader is lost."""
        host, _, port = lease.address.rpartition(":")
        try:
            connection = connect((host, int(port)), self.secret, CONNECT_SECONDS)
        except (ChannelError, ValueError) as error:
            self.warned_of_leader = self._warn_once(f"the leader does not answer: {error}", self.warned_of_leader)
            return None
        inbox: Inbox = queue.SimpleQueue()
        threading.Thread(target=receive_messages, args=(connection, inbox), daemon=True).start()
        member = self._member()
        member.join(time.monotonic())
        self.warned_of_leader = ""
        warn(f"host {self.name} joins the job that {host} leads (attempt {lease.attempt})")
        try:
            return self._serve_leader(member, connection, inbox)
        finally:
            self.local.end()
            connection.close()

    def _serve_leader(self, member: Member, connection: Connection, inbox: Inbox) -> dict[str, Any] | None:
        forwarded = 0
        leave_at = float("inf")
        while True:
            with suppress(queue.Empty):
                _, message, _ = inbox.get(timeout=POLL_SECONDS)
                if message is None:
                    member.lose_leader("the connection to the leader has ended")
                elif message["kind"] == "exit" and message["exit_code"] == 0:
                    return message
                else:
                    member.receive(message)
            leave = self.local.drive(member)
            if leave is not None:
                raise JobEnded(leave.exit_code, leave.reason)
            member.tick(time.monotonic(), self.local.read)
            if len(self.received) > forwarded:
                forwarded += 1
                if forwarded > 1:
                    raise KilledBySignal(self.received[-1])
                member.outbox.append({"kind": "signal", "signal": self.received[forwarded - 1]})
                leave_at = min(leave_at, time.monotonic() + self.launch.grace_period + self.launch.host_timeout)
            try:
                for message in take(member.outbox):
                    connection.send(encode_message(message))
            except ChannelError as error:
                member.lose_leader(str(error))
            self._fence(member.newest_attempt + bool(member.lost))  # others may replace the ranks of a lost host
            if member.lost and self.local.running is None:
                warn(f"host {self.name} has lost the leader: {member.lost}")
                return None
            if time.monotonic() > leave_at:
                raise StoppedBeforeStart(self.received[0])


def receive_messages(connection: Connection, inbox: Inbox, first: bytes = b"") -> None:
    """Puts the messages of a connection into the inbox until it ends, or one is not valid. Beats are acknowledged at
    once, with the time that the leader will count from. `first` is a message that was received already.
    """
    try:
        while True:
            message, first = decode_message(first or connection.receive(MAX_MESSAGE_BYTES)), b""
            inbox.put((connection, message, time.monotonic()))
            if message["kind"] == "beat":
                connection.send(encode_message(acknowledgement(message)))
    except ChannelError:
        connection.close()
        inbox.put((connection, None, time.monotonic()))


def supervise_hosts(
    folder: RunFolder,
    launch: LaunchConfig,
    launcher: LocalLauncher,
    make_viewer: Callable[[int], Viewer],
    policy: HostsPolicy,
    secret: bytes,
    beside: Callable[[StartAttempt], StartAttempt],
    fresh: bool,
    keeper: SnapshotKeeper | None = None,
    **options: Any,
) -> Any:
    """Runs this host's part of a job on several hosts, and returns the summary of the job on every host. Options are
    those of `supervise`.
    """
    with received_signals() as received:
        supervisor = HostSupervisor(
            folder, launch, launcher, make_viewer, policy, secret, received, options, beside, fresh, keeper
        )
        return supervisor.run()
