"""FSDP and tensor-parallel runs recover from kills, hangs, silent errors, non-finite values and signals."""

from __future__ import annotations

import pytest

from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import STEPS, final_digest, losses
from tests.kit.small_run import step_records

LAYOUTS = {
    "sharded": ("--layout.shard=parameters",),
    "sharded optimizer": ("--layout.shard=optimizer", "--batch.micro=4"),
    "tensor": ("--layout.tensor=2",),
}


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ("sharded", "step.backward:rank1:kill@step5#0,save.write:rank0:kill@step9#1"),
        pytest.param(
            "sharded optimizer",
            "evaluate:rank0:kill@step4#0,step.update:rank1:kill@step8#1",
            marks=pytest.mark.long,
        ),
        ("tensor", "step.forward:rank1:kill@step7#0"),
    ],
)
def test_killed_run_ends_bitwise_equal_to_undisturbed_run(layout, faults, undisturbed, runs):
    runs.run(faults, *LAYOUTS[layout])
    expected_folder = undisturbed(layout)
    assert len([i for i in runs.incidents if i.error_type == "Killed"]) == faults.count("kill")
    assert final_digest(runs.folder) == final_digest(expected_folder)
    assert losses(runs.folder) == losses(expected_folder)
    assert sorted(step_records(runs.folder)) == list(range(STEPS))


@pytest.mark.parametrize(
    ("layout", "fault", "phase"),
    [
        pytest.param("sharded", "step.backward:rank1:hang@step7", "backward", marks=pytest.mark.long),
        pytest.param("tensor", "step.forward:rank1:stop@step7", "forward", marks=pytest.mark.long),
        ("tensor", "step.forward:rank1:hang@step1", "forward"),  # while the step is counted
    ],
)
def test_hung_rank_is_named_not_the_ranks_that_wait_in_an_all_gather(layout, fault, phase, runs):
    runs.run(fault, *LAYOUTS[layout], "--launch.hang_timeout=4")
    hang = runs.incidents[0]
    assert (hang.outcome, hang.rank, hang.step, hang.phase) == ("hang", 1, int(fault[-1]), phase)
    assert "the other ranks wait in" in hang.message


@pytest.mark.parametrize("layout", ["sharded", "tensor"])
def test_nonfinite_gradient_is_skipped_on_every_rank(layout, runs):
    skip = ("--numerics.on_nonfinite=skip", "--numerics.skip_budget=3")
    result = runs.run("step.backward:rank1:nan@step4", *LAYOUTS[layout], *skip)
    assert (result.steps, result.skipped) == (STEPS, 1)
    for rank in (0, 1):
        assert [e["step"] for e in runs.events("step", rank) if e.get("skipped")] == [4]


@pytest.mark.parametrize(
    "layout", [name if name == "sharded" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_sigterm_stops_all_ranks_at_one_step_after_a_checkpoint(layout, runs, undisturbed):
    """Whether parameters are unsharded at that moment or not."""
    with pytest.raises(MeshwrightError, match="stopped by signal 15 before step 7, on every rank"):
        runs.run("step.forward:rank1:term@step6", *LAYOUTS[layout])
    assert runs.published()[0].step == 7
    runs.run("", *LAYOUTS[layout])
    assert final_digest(runs.folder) == final_digest(undisturbed(layout))


def test_flipped_bit_in_a_replicated_shard_is_found(runs):
    """The first parameter is sharded; with hybrid sharding two ranks have the same shard."""
    hybrid_shard = ("--layout.shard=parameters", "--layout.shard_degree=2", "--launch.restarts=0")
    with pytest.raises(MeshwrightError, match=r"rank 3 differs|differ among the 2 replicas"):
        runs.run("step.fetch:rank3:flip@step4", *hybrid_shard, "--numerics.compare_every=1", ranks=4)
