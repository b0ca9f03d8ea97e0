"""The server of the rollout service: one thread that reads requests, appends groups, and answers in a fixed order.

The learner (rank 0) and the generators connect to a Unix socket. A request for a batch or for an assignment waits here
until the queue can answer it. The groups that arrive together are one append to the log, which is durable before any
of their generators is told so.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.base.framing import MessageAssembler, PeerEnded, send, socket_path
from meshwright.errors import MeshwrightError
from meshwright.rl.log.frames import MAX_RECORD_BYTES
from meshwright.rl.log.interface import RolloutLog
from meshwright.rl.log.open_log import open_rollout_log
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.queue.rollout_queue import RolloutQueue
from meshwright.rl.queue.settings import FilterBudgetExceeded
from meshwright.rl.rollout import InvalidRollout, RolloutGroup
from meshwright.rl.service.setup import RolloutSetup
from meshwright.rl.version import PolicyVersion

SEND_SECONDS = 10.0
"""A client that does not read its answer for so long is disconnected."""
REPORT_SECONDS = 0.5
"""The interval at which a waiting learner learns that generators make progress."""
MAX_PROBLEMS = 20
MAX_GROUP_BYTES = MAX_RECORD_BYTES
"""Size limit of an encoded group, as in the rollout log: a message with more is not read."""
MAX_UNAVAILABLE = 10
"""Assignments in a row whose policy no generator could load, after which the attempt ends."""
MAX_GROUPS = 8
"""Groups that a generator is assigned at once, at most: a generator that dies loses the ones that it has not sent."""


@dataclass
class Client:
    """A connection."""

    connection: socket.socket
    assembler: MessageAssembler = field(default_factory=partial(MessageAssembler, MAX_GROUP_BYTES))
    generator: str = ""
    """the name of a generator; empty for the learner"""
    learner: bool = False
    """whether it has begun an attempt"""
    pending: dict[str, Any] | None = None
    """the request that is not answered yet"""
    since: float = 0.0
    """when the pending request arrived, or when the group that it works on was assigned"""
    idle_seconds: float = 0.0
    """the time that a generator has waited for an assignment"""
    connected: float = field(default_factory=time.monotonic)


class RolloutServer:
    """Serves one learner and any number of generators. `queue` exists once the learner has begun."""

    def __init__(self, setup: RolloutSetup, watch: Callable[[RolloutServer], str] = lambda _server: "") -> None:
        """`watch` is called in every turn of the loop; it returns why no generator can work, if that is so."""
        self.setup, self.watch = setup, watch
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.clients: dict[int, Client] = {}
        self.queue: RolloutQueue | None = None
        self.log: RolloutLog | None = None
        self.run = ""
        self.attempt = 0
        self.digests: dict[PolicyVersion, str] = {}
        """the digests of the published policies that may be assigned"""
        self.progress = 0
        """grows while generators work: a learner that waits meanwhile does not hang"""
        self.last_problem = ""
        self.problems: list[str] = []
        """what went wrong since the learner last asked, for its events"""
        self.arrived: list[tuple[Client, RolloutGroup]] = []
        self.useful: set[str] = set()
        """the generators that are connected and have sent a group"""
        self.unavailable = 0
        """assignments in a row whose policy could not be loaded"""
        self.failure = ""
        """why no generator can generate the next groups, whoever tries"""
        self.reward_failure = ""
        """the last group without a reward, with its cause"""
        self.unwritten_since = 0.0
        """since when the rollout log cannot be written; 0: it can"""
        self.last_report = 0.0
        self.retired = {"idle": 0.0, "connected": 0.0}
        """seconds of generators that have disconnected"""

    def listen(self) -> None:
        with socket_path(self.setup.address) as path:
            self.listener.bind(path)
        self.listener.listen(1024)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def turn(self, seconds: float = 0.1) -> None:
        """Reads what has arrived, appends the groups, and answers what can be answered."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.listener:
                self._accept()
            elif (client := self.clients.get(key.fd)) is not None:  # or it was disconnected in this turn
                self._read(client)
        self._append()
        if self.queue is not None:
            self._assign()
        self._answer_learners(self.watch(self))

    def _accept(self) -> None:
        with suppress(OSError):  # the client is gone, or this process has too many open files
            connection, _ = self.listener.accept()
            connection.settimeout(SEND_SECONDS)
            self.clients[connection.fileno()] = Client(connection)
            self.selector.register(connection, selectors.EVENT_READ)

    def _read(self, client: Client) -> None:
        try:
            for header, content in client.assembler.receive_available(client.connection):
                self._handle(client, header, bytes(content))
        except MeshwrightError as error:  # a request that the queue refuses
            self._send(client, {"error": [error.message, error.hint], "again": error.exit_code == 1})
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            if not isinstance(error, PeerEnded):
                self.report(f"{client.generator or 'the learner'} was disconnected: {error}")
            self.disconnect(client)

    def _handle(self, client: Client, header: dict[str, Any], content: bytes) -> None:
        call = header["call"]
        if call == "ping":
            self._send(client, {"pong": True})
        elif call == "hello":
            client.generator = str(header["generator"])[:100]
        elif call == "assign":
            client.pending, client.since = header, time.monotonic()
        elif call == "group":
            client.pending, client.since = None, time.monotonic()  # the time of the next group that it has begins
            self._receive_group(client, content)
        elif call == "unavailable":  # the generator could not load the policy: the group returns to the pool
            self.unavailable += 1
            reason = str(header["reason"])[:1000]
            self.failure = reason if header.get("final") is True else self.failure
            self.report(f"{client.generator}: {reason}")
            if self.queue is not None:
                self.queue.release(client.generator)
        elif call == "begin":
            self._begin(client, header)
        elif call == "publish":
            self._publish(client, header)
        elif call == "batch":
            self._require_attempt(client, header)
            client.pending, client.since = header, time.monotonic()

    def _receive_group(self, client: Client, content: bytes) -> None:
        try:
            group = RolloutGroup.decode(content)
        except InvalidRollout as error:
            self.report(f"{client.generator}: {error}")
            send(client.connection, {"verdict": "invalid"})
            return
        if self.setup.vocab and max(int(r.tokens.max()) for r in group.rollouts) >= self.setup.vocab:
            raise ValueError(f"group {group.group} has a token that the model does not have")
        if group.generator != client.generator:
            raise ValueError(f"a group of {group.generator[:100]!r}")
        self.arrived.append((client, group))
        self.useful.add(client.generator)
        self.unavailable = 0

    def _append(self) -> None:
        """Appends the groups that have arrived. On a full disk the generators keep theirs, and send them again."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        if self.queue is None:
            answers = [{"verdict": "not_permitted"} for _ in arrived]
        else:
            try:
                receipts = self.queue.add([group for _, group in arrived])
                self.unwritten_since = 0.0
                answers = [{"verdict": receipt.verdict} for receipt in receipts]
                for receipt, (client, _) in zip(receipts, arrived, strict=True):
                    if receipt.reason:
                        self.report(f"{client.generator}: group {receipt.group}: {receipt.reason}")
            except (MeshwrightError, OSError) as error:
                self.report(f"the rollout log cannot be written: {error}")
                self.unwritten_since = self.unwritten_since or time.monotonic()
                answers = [{"verdict": "retry"} for _ in arrived]
        for (client, group), answer in zip(arrived, answers, strict=True):
            if answer["verdict"] == "retry":
                client.since = time.monotonic()  # it waits for the disk, and is not late with its group
            elif group.failure:
                self.reward_failure = f"group {group.group} has no reward: {group.failure}"
                self.report(self.reward_failure)
            self._send(client, answer | {"group": group.group})

    def _assign(self) -> None:
        """Assigns every waiting generator its share of a step, in the order of their requests."""
        assert self.queue is not None
        generators = [client for client in self.clients.values() if client.generator]
        waiting = [client for client in generators if client.pending is not None]
        share = min(MAX_GROUPS, -(-self.setup.groups_per_step // max(1, len(generators))))
        for client in sorted(waiting, key=lambda client: client.since):
            groups: list[dict[str, Any]] = []
            while len(groups) < share and (assignment := self.queue.assign(client.generator)) is not None:
                record = {"group": assignment.group, "prompt_id": assignment.prompt_id}
                version, digest = assignment.version, self.digests.get(assignment.version, "")
                groups.append(record | {"version": version.to_json(), "digest": digest})
            if not groups:
                return
            now = time.monotonic()
            client.idle_seconds += now - client.since
            client.pending, client.since = None, now
            reference = self.queue.lineage.version(0).to_json()
            self._send(client, {"run": self.run, "groups": groups, "reference": reference})

    def _begin(self, client: Client, header: dict[str, Any]) -> None:
        """A new attempt of the learner: it resumes from a cursor, or begins the run."""
        attempt = int(header["attempt"])
        if attempt < self.attempt:
            raise ValueError(f"attempt {attempt} is older than attempt {self.attempt}")
        cursor = RolloutCursor.from_json(header["cursor"]) if header["cursor"] is not None else None
        step, fork = int(header["step"]), header["fork"] is True
        for other in [other for other in self.clients.values() if other.learner and other is not client]:
            self.disconnect(other)  # the learner of an earlier attempt
        client.learner, self.attempt, self.unavailable, self.failure = True, attempt, 0, ""
        if self.log is None:
            self.run = str(header["run"])
            self.log = open_rollout_log(self.setup.folder, self.run, self.setup.config.rl.segment_bytes)
            for damage in self.log.cut:
                self.report(f"the rollout log was cut at {damage.position}: {damage.reason}")
        if self.queue is None:
            self.queue = RolloutQueue(self.setup.queue_settings(), self.log, self.setup.prompt_id)
        self.queue.begin(cursor, attempt, step, fork)
        for damage in self.queue.damaged[:MAX_PROBLEMS]:
            self.report(f"the rollout log is damaged at {damage.position}: {damage.reason}")
        self._send(client, {"lineage": self.queue.lineage.to_json()})

    def _publish(self, client: Client, header: dict[str, Any]) -> None:
        self._require_attempt(client, header)
        assert self.queue is not None
        version = PolicyVersion.from_json(header["version"])
        self.queue.publish(version)
        self.digests[version] = str(header["digest"])
        needed = self.queue.policies_needed()
        self.digests = {version: digest for version, digest in self.digests.items() if version in needed}
        self._send(client, {"needed": [version.to_json() for version in sorted(needed)]})

    def _require_attempt(self, client: Client, header: dict[str, Any]) -> None:
        if int(header["attempt"]) != self.attempt or self.queue is None or client.generator:
            raise ValueError(f"a request of attempt {header['attempt']} in attempt {self.attempt}")

    def _give_up(self) -> str:
        """Why no batch can be expected any more, or an empty string."""
        if self.failure:
            return self.failure
        seconds = self.setup.config.launch.hang_timeout
        if self.unwritten_since and time.monotonic() - self.unwritten_since > seconds:
            return f"the rollout log could not be written for {seconds:g} s: {self.last_problem}"
        if self.unavailable >= MAX_UNAVAILABLE:
            return f"generators could not load a policy {self.unavailable} times in a row: {self.last_problem}"
        return ""

    def _count_progress(self) -> None:
        """A group that a generator has, and has not had for too long, is progress: it ends within a known time."""
        limit, now = self.setup.config.rl.generator_timeout, time.monotonic()
        generators = [client for client in self.clients.values() if client.generator and client.since]
        if any(client.pending is None and now - client.since <= limit for client in generators):
            self.progress += 1

    def _answer_learners(self, fatal: str) -> None:
        now = time.monotonic()
        due = now - self.last_report >= REPORT_SECONDS
        fatal = fatal or self._give_up()
        if due:
            self._count_progress()
        for client in list(self.clients.values()):
            if client.generator or client.pending is None or self.queue is None:
                continue
            try:
                batch = self.queue.batch(int(client.pending["step"]))
            except MeshwrightError as error:
                client.pending = None
                failed = isinstance(error, FilterBudgetExceeded) and self.reward_failure
                message = f"{error.message}; {self.reward_failure}" if failed else error.message
                self._send(
                    client,
                    {"error": [message, error.hint], "again": error.exit_code == 1, "problems": self.take_problems()},
                )
                continue
            if batch is not None:
                client.pending = None
                answer = batch.to_json() | {"cursor": batch.cursor.to_json(), "status": self.status()}
                self._send(client, answer | {"problems": self.take_problems()})
            elif fatal:
                client.pending = None
                again = self.unavailable >= MAX_UNAVAILABLE  # another attempt may publish the policy again
                self._send(client, {"error": [fatal, ""], "again": again, "problems": self.take_problems()})
            elif due:
                self._send(client, {"waiting": self.progress, "problems": self.take_problems()})
        if due:
            self.last_report = now

    def status(self) -> dict[str, Any]:
        """Depths and shares for metrics; the seconds are totals since the service started."""
        assert self.queue is not None
        now = time.monotonic()
        generators = [client for client in self.clients.values() if client.generator]
        idle = sum(c.idle_seconds + (now - c.since if c.pending is not None else 0.0) for c in generators)
        connected = sum(now - client.connected for client in generators)
        return self.queue.status() | {
            "generators_connected": len(generators),
            "generator_idle_seconds": round(idle + self.retired["idle"], 3),
            "generator_seconds": round(connected + self.retired["connected"], 3),
        }

    def report(self, problem: str) -> None:
        """Keeps a problem for the events of the learner, and prints it to the log of the service."""
        self.last_problem = problem
        with suppress(OSError):  # the disk may be full
            print(problem, flush=True)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def take_problems(self) -> list[str]:
        taken, self.problems = self.problems, []
        return taken

    def _send(self, client: Client, header: dict[str, Any]) -> None:
        try:
            send(client.connection, header)
        except OSError:
            self.disconnect(client)

    def disconnect(self, client: Client) -> None:
        """Closes a connection. The groups that a generator was assigned return to the pool."""
        if self.clients.pop(client.connection.fileno(), None) is None:
            return
        self.selector.unregister(client.connection)
        client.connection.close()
        if client.generator:
            self.useful.discard(client.generator)
            self.retired["idle"] += client.idle_seconds
            self.retired["connected"] += time.monotonic() - client.connected
            if self.queue is not None and not any(c.generator == client.generator for c in self.clients.values()):
                self.queue.release(client.generator)
