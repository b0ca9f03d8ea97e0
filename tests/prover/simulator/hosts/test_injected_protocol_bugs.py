"""Bugs injected into the supervisor protocol, each of which the schedules must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.base.records.incidents import Incident
from meshwright.core.recover.hosts.election import Choice, Election
from meshwright.core.recover.hosts.host_ranks import HostRanks
from meshwright.core.recover.hosts.leader import Ended, Host, Leader
from meshwright.core.recover.hosts.member import Member
from tests.simulated_hosts import invariants
from tests.simulated_hosts.cluster import HostCluster
from tests.simulated_hosts.schedule import run_schedule
from tests.simulated_hosts.store import SharedStore
from tests.simulated_hosts.training import RankGroup

MAX_SEEDS = 400

Inject = Callable[[pytest.MonkeyPatch], None]


def saver_skips_the_fence_and_takeovers_inherit_everything(patch):
    """No fence at all: a zombie's checkpoint counts."""
    patch.setattr(SharedStore, "list_published", all_checkpoints)
    patch.setattr(RankGroup, "_check_fence", publish_without_check)


def all_checkpoints(store):
    return sorted(store.checkpoints, key=lambda entry: (entry.step, entry.attempt), reverse=True)


def publish_without_check(group, step, last):
    if group.coordinator.runs:
        group.loop.after(group.cluster.scenario.publish_seconds, group._publish, step, last)
        group.cluster.fence_passed(group)


def lease_inherits_nothing(patch):
    """A takeover forgets the checkpoints of earlier attempts, so that the job begins again."""
    patch.setattr(HostCluster, "inherited", lambda cluster: {})


def election_ignores_beats(patch):
    """A host without a leader takes the lease although the holder's counter advances."""

    def decide(election, lease, now):
        if lease is not None and not lease.final and election.seen:
            return Choice.TAKE
        election.seen = (1,)
        return Choice.TAKE if lease is None else Choice.EXIT if lease.final else Choice.JOIN

    patch.setattr(Election, "decide", decide)


def member_keeps_a_silent_leader(patch):
    """A member never gives up a leader that acknowledges nothing."""
    tick = Member.tick

    def keep(member, now, ranks=dict):
        member.heard = now
        tick(member, now, ranks)

    patch.setattr(Member, "tick", keep)


def leader_does_not_find_silent_hosts(patch):
    tick = Leader.tick

    def forget_silence(leader, now, checkpointed=False):
        for host in leader.hosts.values():
            host.heard = now
        tick(leader, now, checkpointed)

    patch.setattr(Leader, "tick", forget_silence)


def leader_does_not_wait_for_old_ranks(patch):
    """The next attempt is placed on hosts whose ranks still run, and members start it beside them."""

    def is_complete(leader):
        if leader.placed and leader.ended:
            for name in leader.placed:
                leader.ended.setdefault(name, Ended(name, {"failures": []}, "", 0.0))
        return bool(leader.failure) or bool(leader.ended)

    receive = Member.receive

    def start_anyway(member, message):
        if message["kind"] == "start":
            member.attempt = 0
        receive(member, message)

    patch.setattr(Leader, "_idle", lambda leader: list(leader.hosts))
    patch.setattr(Leader, "is_complete", property(is_complete))
    patch.setattr(Member, "receive", start_anyway)


def join_keeps_the_record_of_the_old_supervisor(patch):
    """A supervisor that was started again, or has joined again, does not end the ranks it had."""

    def join(leader, message, now):
        known = leader.hosts.get(message["host"])
        attempt = known.attempt if known is not None else message["attempt"]
        ports = message["control_port"], message["port"]
        leader.hosts[message["host"]] = Host(
            message["host"], message["token"], message["address"], *ports, now, attempt
        )
        leader.outbox.append((message["host"], {"kind": "welcome", "attempt": leader.attempt}))
        return ""

    patch.setattr(Leader, "join", join)
    patch.setattr(Leader, "_kill", lambda leader, now: None)


def port_of_an_attempt_is_used_again(patch):
    """The process group of the next attempt may be at the address of the one before, until the next beat."""
    patch.setattr(HostRanks, "start", start_with_the_old_port)


def start_with_the_old_port(ranks, attempt, restart):
    ranks.checkpointed = False
    ranks.leader.begin(attempt, restart, ranks.clock())
    return ranks


def leader_loses_its_own_host(patch):
    """Ranks of the leader's host that end late count as lost with their host."""

    def kill(leader, now):
        if leader.killed_at is None:
            leader.killed_at = now
            for name in leader._running():
                leader.outbox.append((name, {"kind": "kill", "attempt": leader.attempt}))
        elif now - leader.killed_at > leader.policy.host_timeout:
            for name in leader._running():
                leader.lose(name, "its ranks did not end", now)

    patch.setattr(Leader, "_kill", kill)


def signal_is_forgotten_after_a_failure(patch):
    """A job that was asked to stop, and failed on the way, is continued by a host that was not told."""
    patch.setattr(Incident, "ends_job", property(lambda incident: incident.outcome in ("complete", "stopped")))


def lost_host_is_not_counted(patch):
    """The leader forgets a lost host, and waits for its ranks."""

    def lose(leader, name, reason, now):
        leader.hosts.pop(name, None)

    patch.setattr(Leader, "lose", lose)
    patch.setattr(Leader, "_kill", lambda leader, now: None)


BUGS: list[tuple[Inject, str, int]] = [
    (saver_skips_the_fence_and_takeovers_inherit_everything, invariants.ONE_WRITER, 14),
    (lease_inherits_nothing, invariants.INHERITED, 0),
    (election_ignores_beats, invariants.LIVENESS, 0),
    (member_keeps_a_silent_leader, invariants.FENCED_RANKS, 40),
    (leader_does_not_find_silent_hosts, invariants.DETECTION, 8),
    (leader_does_not_wait_for_old_ranks, invariants.ONE_ATTEMPT, 2),
    (join_keeps_the_record_of_the_old_supervisor, invariants.LIVENESS, 75),
    (port_of_an_attempt_is_used_again, invariants.ONE_ATTEMPT, 19),
    (leader_loses_its_own_host, invariants.NO_ERROR, 207),
    (signal_is_forgotten_after_a_failure, invariants.EXIT_CODE, 69),
    (lost_host_is_not_counted, invariants.LIVENESS, 5),
]


@pytest.mark.parametrize(("inject", "invariant", "first"), BUGS, ids=[inject.__name__ for inject, _, _ in BUGS])
def test_schedules_find_an_injected_bug(monkeypatch, inject, invariant, first):
    """`first` is the seed that found it last, so that the test is quick; later seeds find it as well."""
    inject(monkeypatch)
    results = (run_schedule(seed) for seed in range(first, first + MAX_SEEDS))
    assert any(violation.invariant == invariant for result in results for violation in result.violations)


def test_schedules_of_these_seeds_pass_without_a_bug():
    assert [seed for *_, seed in BUGS if run_schedule(seed).violations] == []
