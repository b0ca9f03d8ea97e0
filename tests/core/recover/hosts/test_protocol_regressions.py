"""Faults of the supervisor protocol that the simulation of hosts has found."""

from __future__ import annotations

from meshwright.base.records.incidents import Incident, assign_verdict
from meshwright.core.recover.hosts.leader import HostsPolicy, Leader
from meshwright.core.recover.hosts.member import Member

POLICY = HostsPolicy(2, 2, 1, 10.0, 60.0, True, lambda _hosts: "")


def join(name, token):
    ports = {"control_port": 1, "port": 2}
    return {"kind": "join", "host": name, "token": token, "address": name, "attempt": 0} | ports


def running_leader():
    leader = Leader(POLICY, "a")
    leader.join(join("a", "1"), 0.0)
    leader.join(join("b", "2"), 0.0)
    leader.begin(1, 0, 0.0)
    leader.tick(0.0)
    assert leader.placed == ["a", "b"]
    return leader


def test_host_that_joins_again_has_lost_its_ranks():
    leader = running_leader()
    leader.join(join("b", "2"), 3.0)
    assert leader.ended["b"].lost == "its supervisor has joined again"


def test_leader_waits_for_ranks_of_its_own_host():
    leader = running_leader()
    leader.kill(1.0)
    leader.tick(1.0)
    leader.tick(20.0)
    assert "a" in leader.hosts
    assert "a" not in leader.ended


def test_member_sends_no_beat_to_a_leader_that_it_has_given_up():
    member = Member("b", "2", "b", 1, 10.0, lambda: 2)
    member.lose_leader("test")
    member.tick(5.0)
    assert member.outbox == []


def test_lost_peers_at_one_place_are_not_a_deterministic_failure():
    lost = [Incident(attempt, "failed", 1, None, "start", 8, "PeerError", "lost") for attempt in (1, 2)]
    assert assign_verdict(lost[1], lost[:1]).verdict != "deterministic"


def test_failure_after_a_signal_ends_the_job_on_every_host():
    incident = Incident(3, "failed", exit_code=8, signal=15)
    assert incident.ends_job
    assert incident.job_exit_code == 143
