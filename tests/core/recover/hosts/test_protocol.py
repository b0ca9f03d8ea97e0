"""The protocol of the supervisors of a job: who leads, which hosts run which ranks, and which host is lost."""

from __future__ import annotations

import pytest

from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.election import Choice, Election, LeaseView
from meshwright.core.recover.hosts.leader import END_SECONDS, HostsPolicy, Leader
from meshwright.core.recover.hosts.member import FENCE_FRACTION, KillRanks, LeaveJob, Member, SignalRanks, StartRanks

TIMEOUT = 10.0


def lease(attempt: int = 1, beats: str = "1", **values) -> LeaseView:
    return LeaseView(**{"attempt": attempt, "token": "t", "job": "j", "address": "h:1", "beats": beats} | values)


def test_host_takes_the_lease_of_a_run_without_one_or_of_an_ended_job():
    election = Election("j", "me", 6)
    assert election.decide(None, 0) is Choice.TAKE
    assert election.decide(lease(job="other", outcome="failed"), 0) is Choice.TAKE


def test_host_joins_a_leader_whose_beats_advance_and_never_replaces_it():
    election = Election("j", "me", 6)
    for second in range(100):
        assert election.decide(lease(beats=str(second // 3)), second) is Choice.JOIN


def test_host_replaces_a_leader_whose_beats_stand_still():
    election = Election("j", "me", 6)
    choices = [election.decide(lease(), second) for second in range(8)]
    assert choices == [Choice.JOIN] * 6 + [Choice.TAKE] * 2


def test_host_waits_for_the_leader_to_take_the_next_lease_after_a_failed_attempt():
    election = Election("j", "me", 6)
    choices = [election.decide(lease(outcome="failed", exit_code=8), second) for second in range(8)]
    assert choices == [Choice.WAIT] * 6 + [Choice.TAKE] * 2


@pytest.mark.parametrize("outcome", ["complete", "stopped", "failed"])
def test_host_leaves_when_its_job_has_ended_for_good(outcome):
    """Also a host that starts late: it must not begin again what was stopped."""
    assert Election("j", "me", 6).decide(lease(outcome=outcome, final=True), 0) is Choice.EXIT


def test_host_is_refused_by_a_run_that_another_job_holds():
    election = Election("j", "me", 6)
    choices = [election.decide(lease(beats=str(second // 2), job="k"), second) for second in range(3)]
    assert choices == [Choice.WAIT, Choice.WAIT, Choice.BUSY]


def test_host_replaces_the_dead_holder_of_another_job():
    election = Election("j", "me", 6)
    choices = [election.decide(lease(job="k"), second) for second in range(7)]
    assert choices == [Choice.WAIT] * 6 + [Choice.TAKE]


def test_host_that_could_not_lead_leaves_the_lease_to_others_for_a_while():
    election = Election("j", "me", 6)
    election.step_back(100)
    ended = lease(outcome="failed", token="me")
    assert election.decide(ended, 101) is Choice.WAIT
    assert election.decide(ended, 100 + 3 * 6) is Choice.TAKE


def make_leader(hosts: int = 2, min_hosts: int = 0, refusal=lambda hosts: "", grow: bool = True) -> Leader:
    policy = HostsPolicy(hosts, min_hosts or hosts, 2, TIMEOUT, 60.0, grow, refusal)
    leader = Leader(policy, "a")
    leader.begin(1, 0, 0.0)
    return leader


def join(leader: Leader, name: str, now: float = 0.0, token: str = "", address: str = "", attempt: int = 0) -> str:
    message = {"host": name, "token": token or name, "address": address or f"10.0.0.{ord(name)}"}
    return leader.join(message | {"control_port": 7, "port": 1000 + ord(name), "attempt": attempt}, now)


def sent(leader: Leader, kind: str) -> list[tuple[str, dict]]:
    found = [(name, message) for name, message in leader.outbox if message["kind"] == kind]
    leader.outbox.clear()
    return found


def beat(leader: Leader, *names: str, now: float) -> None:
    for name in names:
        message = {"kind": "beat", "number": 1, "attempt": leader.attempt, "ranks": {}, "port": 1}
        leader.receive(name, message, now)


def begin_again(leader: Leader, now: float) -> None:
    """Begins the second attempt; the leader's own host names another port for its store with its next beat."""
    leader.begin(2, 1, now)
    beat(leader, "a", now=now)


def end(leader: Leader, name: str, now: float, outcome: dict | None = None) -> None:
    leader.receive(name, {"kind": "ended", "attempt": leader.attempt, "outcome": outcome or {"summary": {}}}, now)


def test_ranks_start_once_all_hosts_have_joined_with_rank_0_beside_the_leader():
    leader = make_leader()
    join(leader, "b")
    leader.tick(1.0)
    assert sent(leader, "start") == []
    join(leader, "a", 2.0)
    leader.tick(2.0)
    starts = dict(sent(leader, "start"))
    placements = {name: HostPlacement.from_json(message["placement"]) for name, message in starts.items()}
    assert placements["a"].local_ranks == range(0, 2)
    assert placements["b"].local_ranks == range(2, 4)
    assert placements["b"].hosts == ("a", "b")
    assert placements["a"].port == placements["b"].port == 1000 + ord("a")
    assert placements["b"].world_size == 4


def test_attempt_is_complete_when_every_host_has_ended():
    leader = running_leader()
    end(leader, "a", 2.0)
    assert not leader.is_complete
    end(leader, "b", 3.0)
    assert leader.is_complete


def running_leader(*spares: str, **options) -> Leader:
    leader = make_leader(**options)
    for name in ("a", "b", *spares):
        join(leader, name)
    leader.tick(1.0)
    leader.outbox.clear()
    return leader


def test_silent_host_is_lost_after_the_timeout_and_the_others_are_killed_at_once():
    leader = running_leader()
    beat(leader, "b", now=2.0)
    leader.tick(2.0 + TIMEOUT)
    assert "b" in leader.hosts
    leader.tick(2.1 + TIMEOUT)
    assert leader.ended["b"].lost.startswith("no heartbeat for")
    assert [name for name, _ in sent(leader, "kill")] == ["a"]
    assert leader.blames["b"] == 1


def test_host_whose_connection_ends_is_lost_at_once():
    leader = running_leader()
    leader.lose("b", "its connection has ended", 3.0)
    leader.tick(3.0)
    assert [name for name, _ in sent(leader, "kill")] == ["a"]
    end(leader, "a", 4.0, {"failures": []})
    assert leader.is_complete


def test_spare_host_takes_the_place_of_a_lost_one():
    leader = running_leader("c")
    leader.lose("b", "gone", 3.0)
    leader.tick(3.0)
    end(leader, "a", 4.0, {"failures": []})
    begin_again(leader, 5.0)
    leader.tick(5.0)
    assert leader.placed == ["a", "c"]


def test_host_that_ended_attempts_is_placed_after_a_spare_that_did_not():
    leader = running_leader("c")
    leader.lose("b", "gone", 3.0)
    leader.tick(3.0)
    end(leader, "a", 4.0, {"failures": []})
    join(leader, "b", 4.5, token="b2")
    begin_again(leader, 5.0)
    leader.tick(5.0)
    assert leader.placed == ["a", "c"]


def test_host_that_still_runs_ranks_of_an_earlier_attempt_is_not_placed():
    leader = running_leader()
    end(leader, "a", 2.0, {"failures": []})
    begin_again(leader, 3.0)
    leader.tick(3.0)
    assert leader.placed == []
    leader.receive("b", {"kind": "ended", "attempt": 1, "outcome": {"failures": []}}, 4.0)
    leader.tick(4.0)
    assert leader.placed == ["a", "b"]
    assert leader.ended == {}


def test_host_that_returns_with_an_old_attempt_is_told_to_kill_its_ranks():
    leader = running_leader()
    leader.lose("b", "gone", 3.0)
    join(leader, "b", 4.0, token="b", attempt=1)
    assert ("b", {"kind": "kill", "attempt": 1}) in leader.outbox
    begin_again(leader, 5.0)
    leader.tick(5.0)
    assert leader.placed == []


def test_supervisor_that_was_started_again_replaces_its_predecessor():
    leader = running_leader()
    assert join(leader, "b", 3.0, token="again") == ""
    assert leader.ended["b"].lost == "its supervisor was started again"
    assert leader.hosts["b"].token == "again"


def test_second_host_of_the_same_name_is_refused():
    leader = running_leader()
    assert "another host" in join(leader, "b", 3.0, token="other", address="10.9.9.9")
    assert leader.ended == {}


def test_job_continues_on_fewer_hosts_if_it_may_and_the_batch_divides():
    leader = running_leader("c", hosts=3, min_hosts=1, refusal=lambda hosts: "odd" if hosts == 2 else "")
    leader.lose("b", "gone", 3.0)
    leader.tick(3.0)
    for name in ("a", "c"):
        end(leader, name, 4.0, {"failures": []})
    begin_again(leader, 5.0)
    leader.tick(5.0)
    assert leader.placed == []  # a host may return
    beat(leader, "c", now=5.0 + TIMEOUT)
    leader.tick(5.0 + TIMEOUT)
    assert leader.placed == ["a"]


def test_job_that_may_not_shrink_says_which_hosts_are_there_and_what_does_not_divide():
    leader = make_leader(hosts=3, min_hosts=2, refusal=lambda hosts: "" if hosts == 3 else "16 is not divisible by 6")
    join(leader, "a")
    join(leader, "b")
    beat(leader, "b", now=60.0)
    leader.tick(60.0)
    assert leader.is_complete
    assert leader.failure == "2 of 3 host(s) are ready (a, b) after 60 s; 2 host(s): 16 is not divisible by 6"


def test_leader_that_lost_every_other_host_gives_up_early():
    leader = running_leader()
    leader.lose("b", "gone", 3.0)
    leader.tick(3.0)
    end(leader, "a", 4.0, {"failures": []})
    begin_again(leader, 5.0)
    leader.tick(5.0 + TIMEOUT)
    assert leader.failure.startswith("1 of 2 host(s) are ready (a)")


def shrunk_leader(grow: bool = True) -> Leader:
    leader = make_leader(hosts=2, min_hosts=1, grow=grow)
    join(leader, "a")
    leader.tick(60.0)
    assert leader.placed == ["a"]
    leader.outbox.clear()
    return leader


def test_job_grows_after_a_checkpoint_when_a_host_returns():
    leader = shrunk_leader()
    leader.tick(61.0, checkpointed=True)
    assert sent(leader, "stop") == []
    join(leader, "b", 62.0)
    leader.tick(62.0, checkpointed=False)
    assert sent(leader, "stop") == []
    leader.tick(63.0, checkpointed=True)
    leader.tick(64.0, checkpointed=True)
    assert [name for name, _ in sent(leader, "stop")] == ["a"]
    assert leader.resizing


def test_job_grows_at_a_restart_only_if_that_is_the_policy():
    leader = shrunk_leader(grow=False)
    join(leader, "b", 62.0)
    leader.tick(63.0, checkpointed=True)
    assert sent(leader, "stop") == []


def test_hosts_that_wait_for_failed_ranks_are_killed_after_a_while():
    leader = running_leader()
    end(leader, "b", 2.0, {"failures": [{}]})
    leader.tick(3.0)
    assert sent(leader, "kill") == []
    leader.tick(2.0 + END_SECONDS)
    assert [name for name, _ in sent(leader, "kill")] == ["a"]


def make_member(is_leader: bool = False) -> Member:
    member = Member("b", "token", "10.0.0.2", 7, TIMEOUT, lambda: 5000, is_leader)
    member.join(0.0)
    member.outbox.clear()
    return member


PLACEMENT = HostPlacement(2, 2, ("a", "b"), ("x", "y"), (1, 2), 5000)


def start(member: Member, attempt: int = 3) -> None:
    member.receive({"kind": "start", "attempt": attempt, "restart": 0, "placement": PLACEMENT.to_json()})


def test_member_starts_signals_and_kills_its_ranks_as_the_leader_says():
    member = make_member()
    start(member)
    member.receive({"kind": "stop", "attempt": 3, "signal": 15})
    member.receive({"kind": "kill", "attempt": 3})
    assert member.actions == [StartRanks(3, 0, PLACEMENT), SignalRanks(15), KillRanks()]
    member.ranks_ended({"summary": {}})
    assert member.outbox == [{"kind": "ended", "attempt": 3, "outcome": {"summary": {}}}]
    assert member.attempt == 0


def test_member_ignores_messages_of_earlier_attempts():
    member = make_member()
    member.receive({"kind": "welcome", "attempt": 5})
    start(member, 4)
    member.receive({"kind": "kill", "attempt": 4})
    assert member.actions == []
    start(member, 5)
    start(member, 6)  # while ranks run
    member.receive({"kind": "kill", "attempt": 6})
    assert member.actions == [StartRanks(5, 0, PLACEMENT)]


def test_member_without_acknowledged_beats_kills_its_ranks_before_the_leader_replaces_them():
    member = make_member()
    start(member)
    member.actions.clear()
    for second in range(4):
        member.tick(float(second))
    member.receive({"kind": "acknowledge", "number": 2})  # sent at second 1
    last = 1.0 + FENCE_FRACTION * TIMEOUT
    member.tick(last)
    assert member.actions == []
    member.tick(last + 0.1)
    assert member.actions == [KillRanks()]
    assert "acknowledged no heartbeat" in member.lost


def test_leader_does_not_lose_itself():
    member = make_member(is_leader=True)
    member.tick(1e6)
    assert not member.lost


def test_member_leaves_with_the_exit_code_of_the_job():
    member = make_member()
    member.receive({"kind": "exit", "exit_code": 5, "reason": "why", "summary": {}})
    assert member.actions == [LeaveJob(5, "why")]


def test_beats_that_were_acknowledged_are_forgotten():
    member = make_member()
    for second in range(1000):
        member.tick(float(second))
        member.receive({"kind": "acknowledge", "number": second})
    assert len(member.sent) <= 2
