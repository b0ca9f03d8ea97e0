"""A run whose time goes where no class of causes looks is not judged, and says where the time goes."""

from __future__ import annotations

import time

import pytest

from meshwright.callbacks import Callback
from meshwright.core.api.training import train
from meshwright.insight.diagnose.api import diagnose_folder
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.diagnose.run.unjudged import NEXT
from tests.kit.small_run import small_config


def diagnose(job) -> Finding:
    """The only finding."""
    (finding,) = diagnose_run(job.history())
    return finding


def test_evaluation_every_second_step_is_not_judged(run):
    job = run()
    job.outside = lambda _rank, step: {"evaluate": 0.1464} if step % 2 else {}
    job.gap = lambda _rank, _step: 0.00536
    finding = diagnose(job)
    assert finding.sentence == ("not judged: 44% of the time is between steps (evaluation 41%, records and logging 3%)")
    assert (finding.cause, finding.variant, finding.confidence) == ("not judged", "between steps", "medium")
    assert finding.share == pytest.approx(0.44, abs=1e-3)
    assert finding.rank is None
    assert [figure.figure for figure in finding.evidence] == ["evaluation, per step", "records and logging, per step"]
    assert finding.change.action == NEXT["evaluation"]
    assert finding.share_text == "44% of the time is not explained"


@pytest.mark.parametrize("ranks", [2, 3])
def test_callback_on_one_rank_is_named_with_the_rank(run, ranks):
    job = run("--batch.global=12", ranks=ranks)
    job.outside = lambda rank, step: {"callback": 0.05} if rank == 1 and step else {}
    job.phases = lambda rank, step: {"sync": 0.052} if rank != 1 and step else {}
    finding = diagnose(job)
    assert finding.sentence == ("not judged: 33% of the time is between steps (callbacks 33%), most of it on rank 1")
    assert finding.rank == 1


def test_phases_that_no_single_removal_wins_are_named_together(run):
    """Rank 1 waits inside of the evaluation for the callback of rank 0."""
    job = run()
    job.outside = lambda rank, step: {"evaluate": 0.1} if rank else {"callback": 0.05, "evaluate": 0.05}
    assert "(evaluation 25%, several of these together 25%: evaluation, callbacks)" in diagnose(job).sentence


def test_parts_between_steps_are_no_more_than_the_whole(run):
    """Rank 1 computes as long as either part of rank 0: without both, the step ends no sooner than without one."""
    job = run()
    job.outside = lambda rank, step: {} if rank else {"callback": 0.05, "evaluate": 0.05}
    job.phases = lambda rank, step: {"forward": 0.08, "sync": 0.052} if rank else {}
    sentences = [one.sentence for one in diagnose_run(job.history())]
    assert sentences[1].startswith("not judged: 25% of the time is between steps (evaluation 13%, callbacks 13%), most")


def test_logging_that_waits_for_the_disk_is_not_judged(run):
    job = run()
    job.gap = lambda _rank, _step: 0.025
    assert "20% of the time is between steps (records and logging 20%)" in diagnose(job).sentence


def test_evaluation_before_steps_with_counters_is_seen(run):
    job = run()
    job.fields = lambda _rank, step: {"counted": True} if step % 3 == 0 else {}
    job.outside = lambda _rank, step: {"evaluate": 0.3} if step % 3 == 0 else {}
    assert "(evaluation 49%)" in diagnose(job).sentence


def test_saves_that_a_finding_names_are_judged(run):
    job = run()
    job.outside = lambda _rank, step: {"save": 2.0} if step in (10, 20) else {}
    assert "saves 59%" in diagnose(job).sentence
    facts = {"bytes": 1000, "stall_seconds": 2.0, "seconds": 2.0}
    job.other_events = [{"kind": "checkpoint", "step": step, "folder": "x", **facts} for step in (10, 20)]
    assert diagnose(job).cause == "checkpoint"


def test_waits_for_another_rank_in_every_step_are_not_judged(run):
    """Each rank stalls in one phase or another as often as its peer: no straggler, and no data stall."""
    job = run(steps=60)
    stalls = {7, 12, 22, 31, 44, 51, 57}
    job.phases = lambda rank, step: (
        {} if step not in stalls else {"forward": 0.23} if rank == step % 2 else {"sync": 0.202}
    )
    finding = diagnose(job)
    assert (finding.cause, finding.variant, finding.confidence) == ("not judged", "waits", "low")
    assert finding.sentence == "not judged: for 19% of the time ranks wait for the slowest one"
    assert finding.change.action == NEXT["waits for the slowest rank"]


def test_little_time_that_is_not_explained_is_healthy(run):
    job = run()
    job.outside = lambda rank, _step: {"evaluate": 0.005, "callback": 0.004 * rank}
    assert diagnose(job).cause == "healthy"


def test_time_that_is_not_judged_stands_beside_what_was_found(run):
    job = run()
    job.outside = lambda _rank, _step: {"evaluate": 0.1}
    job.phases = lambda _rank, _step: {"fetch": 0.005}
    assert [one.cause for one in diagnose_run(job.history())] == ["not judged", "data"]


def test_steps_that_are_queued_before_the_previous_one_has_ended_have_nothing_between_them(run):
    job = run()
    job.gap = lambda _rank, _step: -0.01
    assert diagnose(job).cause == "healthy"


class SleepOnRank1(Callback):
    """A callback that takes longer than a step, on a busy machine too."""

    every_rank = True

    def on_step(self, record, run):
        if run.rank == 1:
            time.sleep(max(0.02, 2 * record["seconds"]))


def test_real_run_that_waits_between_its_steps_is_not_judged(tmp_path):
    config = small_config("--eval.every=0", "--checkpoint.mode=off", steps=14)
    train(config, run=tmp_path / "run", callbacks=(SleepOnRank1(),), quiet=True)
    findings = diagnose_folder(tmp_path / "run").findings
    assert "healthy" not in [finding.cause for finding in findings]
    assert "callbacks" in next(finding.sentence for finding in findings if finding.cause == "not judged")
