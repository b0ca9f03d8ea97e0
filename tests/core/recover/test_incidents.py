"""Verdicts of incidents, and the root cause among failed ranks."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from meshwright.base.records.failures import FINAL_EXIT_CODES, Failure, RanksFailed
from meshwright.base.records.incidents import Incident, assign_verdict
from meshwright.core.recover.supervisor import describe_location, raise_if_final
from meshwright.errors import MeshwrightError, NumericsError, StoppedBySignal

ERROR = Incident(2, "failed", 1, 20, "forward", 1, "ValueError", "no", samples=[4, 5])
KILLED = replace(ERROR, error_type="Killed", message="rank 1 was killed by signal 9 (SIGKILL)")


def verdict(now: Incident, *before: Incident) -> str:
    return assign_verdict(now, list(before)).verdict


def test_same_step_and_samples_twice_is_data_dependent():
    judged = assign_verdict(ERROR, [replace(ERROR, attempt=1)])
    assert judged.verdict == "data-dependent"
    assert "samples 4, 5" in judged.recommendation


def test_same_step_twice_on_other_samples_is_deterministic():
    assert verdict(ERROR, replace(ERROR, samples=[8, 9], rank=0)) == "deterministic"


def test_repeated_failure_in_a_phase_without_samples_is_deterministic():
    assert (
        verdict(replace(ERROR, phase="update", samples=[]), replace(ERROR, phase="update", samples=[]))
        == "deterministic"
    )
    start = replace(ERROR, step=None, phase="start", samples=[])
    assert verdict(start, start) == "deterministic"


def test_failure_while_a_step_is_restored_does_not_repeat_a_failure_of_the_step():
    restoring = replace(ERROR, phase="restore", samples=[])
    assert verdict(restoring, replace(KILLED, phase="update", samples=[])) == "first failure"
    assert verdict(restoring, restoring) == "deterministic"
    assert verdict(replace(ERROR, phase="backward"), ERROR) == "data-dependent"


def test_failure_before_the_first_step_is_described_without_a_step_number():
    start = replace(ERROR, step=None, phase="warmup", samples=[])
    repeated = assign_verdict(start, [start])
    assert "the warmup phase before the first step fails" in repeated.recommendation
    failed = RanksFailed([Failure(1, "ValueError", "no", 1, 0.0)])
    with pytest.raises(RanksFailed):
        raise_if_final(failed, repeated, 1, 3)
    assert failed.verdict.startswith("deterministic: failed again before the first step; ")
    assert describe_location(repeated) == "rank 1, before the first step, warmup"
    assert describe_location(ERROR) == "rank 1, at step 20, forward"


def test_failures_at_changing_steps_are_infrastructure():
    assert verdict(ERROR, replace(ERROR, step=7)) == "infrastructure"
    assert verdict(ERROR, replace(ERROR), replace(ERROR, step=7)) == "infrastructure"


def test_external_kill_is_data_dependent_after_three_times_at_one_step():
    assert verdict(KILLED, KILLED) == "first failure"
    assert verdict(KILLED, KILLED, KILLED) == "data-dependent"
    restoring = replace(KILLED, phase="restore", samples=[])
    assert verdict(restoring, restoring, restoring) == "first failure"


def test_stopped_attempts_do_not_count_as_failures():
    assert verdict(ERROR, replace(ERROR, outcome="stopped")) == "first failure"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rank_that_lost_its_peer_is_never_the_root_cause(order):
    message = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"
    secondary = Failure.from_exception(0, RuntimeError(message))
    cause = Failure.from_exit_status(1, -11)
    failures = [(secondary, cause)[index] for index in order]
    assert RanksFailed(failures).first.rank == 1


def test_connection_error_of_user_code_is_a_root_cause_with_traceback():
    failure = Failure.from_exception(0, RuntimeError("database: Connection refused"))
    assert (failure.secondary, failure.exit_code) == (False, 1)
    assert "RuntimeError: database: Connection refused" in failure.traceback


def test_exception_without_message_is_reported_by_its_class():
    assert Failure.from_exception(0, AssertionError()).message == "AssertionError"
    assert Failure.from_exit_status(0, -40).message == "rank 0 was killed by signal 40 (SIG40)"


def test_repeated_error_at_one_step_stops_the_job_with_the_verdict(runs):
    with pytest.raises(MeshwrightError, match="data-dependent: failed again at step 7") as failed:
        runs.run("step.forward:rank1:raise@step7x9")
    assert failed.value.exit_code == 1
    assert [incident.verdict for incident in runs.incidents] == ["first failure", "data-dependent"]
    assert runs.incidents[1].samples


def test_error_that_does_not_repeat_is_recovered(runs):
    runs.run("step.update:rank0:raise@step7")
    assert "InjectedFault" in runs.incidents[0].stack
    runs.assert_equals_undisturbed_run()


def test_ranks_failed_rebuilds_the_error_class_that_a_rank_raised():
    error = NumericsError("step 7: loss nan", "try a lower learning rate")
    failure = Failure.from_json(json.loads(json.dumps(Failure.from_exception(1, error, step=7).to_json())))
    failed = RanksFailed([failure])
    assert (failed.rank, failed.step) == (1, 7)
    cause = failed.cause()
    assert type(cause) is NumericsError
    assert (str(cause), cause.exit_code) == (str(error), 7)
    stopped = RanksFailed([Failure.from_exception(0, StoppedBySignal(15, 4))]).cause()
    assert (type(stopped), stopped.exit_code) == (StoppedBySignal, 143)


def test_ranks_failed_names_rank_step_and_class_of_a_foreign_exception():
    cause = RanksFailed([Failure.from_exception(1, ZeroDivisionError("division by zero"), step=3)]).cause()
    assert (str(cause), cause.exit_code) == ("rank 1, step 3: ZeroDivisionError: division by zero", 1)
    assert "Traceback" in cause.__notes__[0] or "ZeroDivisionError" in cause.__notes__[0]
    killed = RanksFailed([Failure.from_exit_status(2, -9)]).cause()
    assert (str(killed), killed.exit_code) == ("rank 2 was killed by signal 9 (SIGKILL)", 8)


def test_limit_that_is_reached_before_the_first_step_is_one_line_and_not_retried():
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    failure = Failure.from_exception(0, too_many)
    assert (failure.error_type, failure.exit_code, failure.traceback) == ("ConfigError", 2, "")
    assert failure.exit_code in FINAL_EXIT_CODES
    assert Failure.from_exception(0, too_many, step=7).traceback  # a leak of the program: its traceback helps
