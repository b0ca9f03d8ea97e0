"""What repeats is in the data or in the program; what wanders is in the machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.recover.failures import Failure, RanksFailed
from meshwright.recover.incidents import Incident, judge

ERROR = Incident(2, "failed", 1, 20, "forward", 1, "ValueError", "no", samples=[4, 5])
KILLED = replace(ERROR, kind="Killed", message="rank 1 was ended by signal 9 (SIGKILL)")


def verdict(now: Incident, *before: Incident) -> str:
    return judge(now, list(before)).verdict


def test_the_same_step_twice_on_the_same_samples_is_data_dependent_and_names_them():
    judged = judge(ERROR, [replace(ERROR, attempt=1)])
    assert judged.verdict == "data-dependent"
    assert "samples 4, 5" in judged.next_move


def test_the_same_step_twice_on_other_samples_is_deterministic():
    assert verdict(ERROR, replace(ERROR, samples=[8, 9], rank=0)) == "deterministic"


def test_a_phase_that_touches_no_samples_is_deterministic():
    assert (
        verdict(replace(ERROR, phase="update", samples=[]), replace(ERROR, phase="update", samples=[]))
        == "deterministic"
    )
    start = replace(ERROR, step=None, phase="start", samples=[])
    assert verdict(start, start) == "deterministic"


def test_other_steps_each_time_are_infrastructure():
    assert verdict(ERROR, replace(ERROR, step=7)) == "infrastructure"
    assert verdict(ERROR, replace(ERROR), replace(ERROR, step=7)) == "infrastructure"


def test_a_kill_from_outside_must_come_three_times_at_one_step_before_the_data_is_blamed():
    assert verdict(KILLED, KILLED) == "first of its kind"
    assert verdict(KILLED, KILLED, KILLED) == "data-dependent"
    restoring = replace(KILLED, phase="restore", samples=[])
    assert verdict(restoring, restoring, restoring) == "first of its kind"


def test_attempts_that_did_not_fail_are_no_evidence():
    assert verdict(ERROR, replace(ERROR, outcome="stopped")) == "first of its kind"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_only_lost_its_connection_is_never_blamed(order):
    said = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"
    witness = Failure.of(0, RuntimeError(said))
    cause = Failure.silent(1, -11)
    failures = [(witness, cause)[index] for index in order]
    assert RanksFailed(failures).first.rank == 1


def test_a_users_own_error_about_a_connection_is_an_error_and_keeps_its_stack():
    failure = Failure.of(0, RuntimeError("database: Connection refused"))
    assert (failure.witness, failure.exit_code) == (False, 1)
    assert "RuntimeError: database: Connection refused" in failure.detail


def test_an_error_that_says_nothing_is_known_by_its_name():
    assert Failure.of(0, AssertionError()).message == "AssertionError"
    assert Failure.silent(0, -40).message == "rank 0 was ended by signal 40 (SIG40)"


def test_an_error_of_the_program_in_the_same_step_stops_the_job_with_the_verdict(runs):
    with pytest.raises(RanksFailed, match="data-dependent: step 7 failed again") as failed:
        runs.run("step.forward:rank1:raise@step7x9")
    assert failed.value.exit_code == 1
    assert [incident.verdict for incident in runs.incidents] == ["first of its kind", "data-dependent"]
    assert runs.incidents[1].samples


def test_an_error_that_does_not_come_back_is_survived(runs):
    runs.run("step.update:rank0:raise@step7")
    assert "InjectedFault" in runs.incidents[0].stack
    runs.assert_as_if_undisturbed()
