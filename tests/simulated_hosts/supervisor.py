"""The supervisor of a simulated host: the loops of `supervise_hosts` around the real protocol classes, as a generator
that yields where those sleep. Torch-free.
"""

from __future__ import annotations

import queue
from contextlib import suppress

from meshwright.core.channel import ChannelError
from meshwright.core.recover.hosts.election import Choice, LeaseView
from meshwright.core.recover.hosts.host_ranks import Inbox, take
from meshwright.core.recover.hosts.member import FENCE_FRACTION, Member
from meshwright.core.recover.hosts.messages import Message, encode_message
from meshwright.core.recover.hosts.supervise_hosts import CONNECT_SECONDS, SEEK_SECONDS, SteppedBack
from meshwright.errors import BusyError, MeshwrightError, PeerError, StoppedBeforeStart
from tests.simulated_hosts.events import FOREVER
from tests.simulated_hosts.leading import EPSILON, LeadingSupervisor, Steps
from tests.simulated_hosts.network import SimulatedConnection


class SimulatedSupervisor(LeadingSupervisor):
    """One supervisor process of one host, from its start to its end."""

    # `HostSupervisor.run`.

    def _main(self) -> Steps:
        yield from self.sleep(self.loop.random.uniform(0.2, 1.0) * self.scenario.supervisor_start_seconds)
        try:
            yield from self._run()
            self._exit(0)
        except MeshwrightError as error:
            self.loop.note(self.host, f"{type(error).__name__}: {error}")
            yield from self._end_local()
            self._exit(error.exit_code)

    def _exit(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.cluster.supervisor_ended(self)

    def _run(self) -> Steps:
        election = self.election
        while (earlier := self.cluster.hosts[self.host].ranks) is not None and earlier.runs:  # `rank_lock`
            yield from self.sleep(SEEK_SECONDS)
        while True:
            yield from self.use_store()
            lease = self.cluster.store.view_newest_lease()
            match election.decide(lease, self.clock()):
                case Choice.EXIT:
                    assert lease is not None
                    if lease.outcome == "complete":
                        return
                    raise SimulatedExit(lease.exit_code or 1)
                case Choice.TAKE:
                    if (taken := (yield from self._take(lease))) is not None:
                        try:
                            yield from self._lead(taken)
                            return
                        except (BusyError, SteppedBack) as error:
                            self.loop.note(self.host, f"follows: {error.message}")
                case Choice.JOIN:
                    assert lease is not None
                    if (yield from self._follow(lease)):
                        return
                case Choice.WAIT | Choice.BUSY:
                    pass
            if self.received:
                self.left_alone = True
                raise StoppedBeforeStart(self.received[0])
            yield from self.sleep(SEEK_SECONDS * self.loop.random.uniform(0.5, 1.5))

    def _take(self, seen: LeaseView | None) -> Steps:
        """`take_lease`: other hosts may publish between each of its operations."""
        store = self.cluster.store
        yield from self.use_store()
        newest = store.newest
        if (newest.attempt if newest else 0) != (seen.attempt if seen else 0):
            return None
        yield from self.use_store()
        restart = newest.restart + 1 if newest else 0
        return (yield from self._publish_lease((newest.attempt if newest else 0) + 1, restart))

    # `HostSupervisor._follow` and `_serve_leader`.

    def _follow(self, lease: LeaseView) -> Steps:
        host, _, port = lease.address.rpartition(":")
        inbox: Inbox = queue.SimpleQueue()
        connection = yield from self._connect(host, int(port), inbox)
        if connection is None:
            return False
        self.member = member = self._new_member(is_leader=False)
        member.join(self.clock())
        ended: Message | None = None
        try:
            ended = yield from self._serve_leader(member, connection, inbox)
        except MeshwrightError:
            self.member = None
            yield from self._end_local()
            connection.close()
            raise
        self.member = None
        yield from self._end_local()
        connection.close()
        return ended is not None

    def _connect(self, host: str, port: int, inbox: Inbox) -> Steps:
        network, target = self.cluster.network, self.cluster.listener(host, port)
        answers = network.reaches(self.host, host) and not self.cluster.is_off(host)
        if not answers or (target is not None and target.process.paused):
            yield from self.sleep(CONNECT_SECONDS)
            return None
        seconds = 2 * network.delay((self.host, host)) + 2 * network.delay((host, self.host))
        yield from self.sleep(min(seconds, CONNECT_SECONDS))
        if seconds > CONNECT_SECONDS:
            return None
        if target is None or not target.process.alive or not network.reaches(self.host, host):
            return None
        connection = network.connect(self.host, self.process, inbox, host, target.process, target.inbox)
        if target.leading is None:
            connection.peer.close()
        return connection

    def _serve_leader(self, member: Member, connection: SimulatedConnection, inbox: Inbox) -> Steps:
        forwarded, leave_at = 0, FOREVER
        while True:
            with suppress(queue.Empty):
                _, message, _ = inbox.get_nowait()
                if message is None:
                    member.lose_leader("the connection to the leader has ended")
                elif message["kind"] == "exit" and message["exit_code"] == 0:
                    return message
                else:
                    member.receive(message)
            if (leave := self.local.drive(member)) is not None:
                raise SimulatedExit(leave.exit_code)
            member.tick(self.clock())
            if len(self.received) > forwarded:
                forwarded += 1
                member.outbox.append({"kind": "signal", "signal": self.received[forwarded - 1]})
                leave_at = min(leave_at, self.clock() + self.scenario.grace_period + self.scenario.host_timeout)
            try:
                for message in take(member.outbox):
                    self.instant()
                    connection.send(encode_message(message))
            except ChannelError as error:
                member.lose_leader(str(error))
            if member.lost and self.local.running is None:
                self.loop.note(self.host, f"has lost the leader: {member.lost}")
                return None
            if self.clock() > leave_at:
                self.left_alone = True
                raise StoppedBeforeStart(self.received[0])
            if inbox.empty() and not member.actions:
                yield self._member_deadline(member, leave_at), True

    def _member_deadline(self, member: Member, leave_at: float) -> float:
        fence = member.heard + FENCE_FRACTION * self.scenario.host_timeout + EPSILON
        own = FOREVER if member.lost else min(member.next_beat, fence)
        return min(own, leave_at + EPSILON, self._kill_deadline())


class SimulatedExit(PeerError):
    """The job has ended with this exit code on another host."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code
