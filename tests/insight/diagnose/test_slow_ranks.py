"""Slow ranks, stalls and pipeline bubbles are told apart, and a busy machine is not taken for any of them."""

from __future__ import annotations

import pytest

from meshwright.insight.diagnose.run.step_time import bubble, stragglers

PIPELINE = ("--model.layers=4", "--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=1", "--batch.global=64")


def test_steady_straggler_is_named_with_rank_and_phase(run):
    job = run("--batch.global=12", ranks=3)
    job.phases = lambda rank, _step: {"backward": 0.1} if rank == 2 else {"sync": 0.042}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank, finding.phase) == ("steady", 2, "backward")
    assert finding.share == pytest.approx(0.04 / 0.14, rel=0.01)


def test_ranks_that_are_slow_in_the_same_way_are_one_finding(run):
    job = run(ranks=8)
    job.phases = lambda rank, _step: {"forward": 0.08 + 0.01 * (rank == 6)} if rank > 4 else {"sync": 0.06}
    (finding,) = stragglers.find(job.history())
    assert (finding.rank, finding.phase) == (6, "forward")
    assert finding.sentence.endswith("the others wait for it; ranks 5, 7 are slow in the same way")


@pytest.mark.parametrize("slow", [(0,), (0, 1)])
def test_slow_loader_of_one_pipeline_stage_is_a_straggler(run, slow):
    """A stage has no peers in its passes; every stage reads the samples."""
    layout = ("--model.layers=4", f"--layout.replicate={len(slow)}", "--layout.pipeline=2", "--batch.micro=1")
    job = run(*layout, ranks=2 * len(slow))
    job.phases = lambda rank, _step: {"fetch": 0.06} if rank in slow else {"forward": 0.09}
    job.waits = lambda rank, _step: {} if rank in slow else {"forward": 0.06}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank, finding.phase) == ("steady", 0, "fetch")


def test_waits_inside_a_phase_are_not_the_ranks_own_time(run):
    job = run("--layout.shard=parameters")
    job.phases = lambda _rank, _step: {"backward": 0.1}
    job.waits = lambda rank, _step: {"backward": 0.04} if rank == 0 else {}
    (finding,) = stragglers.find(job.history())
    assert (finding.rank, finding.phase) == (1, "backward")


def test_slow_machine_accuses_no_rank(run):
    job = run()
    job.phases = lambda rank, step: {"forward": 0.03 if (rank + step) % 2 else 0.08}
    assert not list(stragglers.find(job.history()))


def test_small_difference_between_ranks_is_no_straggler(run):
    job = run()
    job.phases = lambda rank, _step: {"forward": 0.03 + 0.006 * rank}
    assert not list(stragglers.find(job.history()))


def test_periodic_stall_is_named_with_its_period(run):
    job = run(steps=50)
    job.phases = lambda rank, step: {"update": 0.4} if rank == 1 and step % 7 == 0 else {}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank, finding.phase, finding.step) == ("periodic", 1, "update", 7)
    assert "every 7 steps" in finding.sentence


def test_period_is_found_on_a_busy_machine(run):
    job = run(steps=50)
    smaller = {5, 9, 16, 17, 30, 33, 41}
    job.phases = lambda rank, step: {"update": 0.5 * (step % 7 == 0) + 0.1 * (step in smaller)} if rank == 1 else {}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank) == ("periodic", 1)


def test_periodic_stall_of_all_ranks_is_named_without_a_rank(run):
    job = run(steps=50)
    job.phases = lambda _rank, step: {"update": 0.4} if step % 6 == 0 else {}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank, finding.phase) == ("periodic", None, "update")
    assert "every 6 steps" in finding.sentence


def test_large_stalls_of_a_rank_that_is_a_little_slow_are_periodic(run):
    job = run(steps=50)
    job.phases = lambda rank, step: {"backward": 0.06 + 0.02 * rank + 0.4 * rank * (step % 5 == 0)}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank) == ("periodic", 1)


def test_stalls_without_a_period_are_now_and_then(run):
    job = run(steps=50)
    job.phases = lambda rank, step: {"forward": 0.5} if rank == 0 and step in (5, 9, 20, 22, 41) else {}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank) == ("now and then", 0)


@pytest.mark.parametrize("stalls", [{(0, 5), (1, 9), (0, 20), (1, 22), (0, 40), (1, 41)}, {(0, 5), (0, 20)}])
def test_stalls_of_all_ranks_or_few_of_them_are_noise(run, stalls):
    job = run(steps=50)
    job.phases = lambda rank, step: {"forward": 0.3} if (rank, step) in stalls else {}
    assert not list(stragglers.find(job.history()))


def test_slow_pipeline_stage_is_a_straggler_and_not_an_uneven_partition(run):
    job = run(*PIPELINE)
    job.phases = lambda rank, _step: {"forward": 0.15} if rank == 1 else {"sync": 0.12}
    (finding,) = stragglers.find(job.history())
    assert (finding.variant, finding.rank, finding.phase, finding.axis) == ("slow stage", 1, "forward", "pipeline")
    assert not [one for one in bubble.find(job.history()) if one.variant == "imbalance"]


def test_stage_with_more_blocks_is_an_imbalance_and_not_a_straggler(run):
    job = run(*PIPELINE, "--model.layers=3")
    job.phases = lambda rank, _step: {"forward": 0.06, "backward": 0.12} if rank == 0 else {"sync": 0.09}
    history = job.history()
    assert not list(stragglers.find(history))
    finding = next(iter(bubble.find(history)))
    assert (finding.variant, finding.rank) == ("imbalance", 0)
    assert finding.change.settings == ("layout.pipeline = 1", "layout.replicate = 2")


def test_few_micro_batches_leave_a_bubble(run):
    job = run(*PIPELINE, "--batch.micro=32")
    job.phases = lambda _rank, _step: {"sync": 0.045}
    (finding,) = bubble.find(job.history())
    assert finding.variant == "fill and drain"
    assert finding.change.settings == ("batch.micro = 8",)
    passes = 0.135 / 0.143  # the rest is fetch and update
    assert finding.share == pytest.approx(passes * (1 - (1 - 1 / 3) / (1 - 1 / 9)))


def test_full_pipeline_with_even_stages_has_no_finding(run):
    assert not list(bubble.find(run(*PIPELINE).history()))


def test_rank_that_is_slow_in_one_phase_and_faster_in_another_is_a_straggler(run):
    job = run("--batch.global=12", ranks=3)
    job.phases = lambda rank, _step: {"forward": 0.09, "backward": 0.02} if rank == 0 else {"sync": 0.03}
    (finding,) = stragglers.find(job.history())
    assert (finding.rank, finding.phase) == (0, "forward")


def test_small_difference_in_one_phase_is_no_straggler(run):
    job = run()
    job.phases = lambda rank, _step: {"forward": 0.03 + 0.012 * rank, "backward": 0.06 - 0.012 * rank}
    assert not list(stragglers.find(job.history()))
