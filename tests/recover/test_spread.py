"""Sharded and cut runs survive what copies survive: killed, hung, silently wrong, not finite, told to stop."""

from __future__ import annotations

import pytest
from recovering import STEPS, Runs, final_digest, ledger, losses

from meshwright.errors import MeshwrightError

LAYOUTS = {
    "sharded": ("--layout.shard=parameters",),
    "kept gathered": ("--layout.shard=optimizer", "--batch.micro=4"),
    "cut": ("--layout.tensor=2",),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Runs]:
    made = {}
    for name, words in LAYOUTS.items():
        with pytest.MonkeyPatch.context() as patch:
            made[name] = Runs(tmp_path_factory.mktemp("calm"), patch, lambda _: None)
            made[name].run("", *words)
    return made


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ("sharded", "step.backward:rank1:kill@step5#0,save.write:rank0:kill@step9#1"),
        ("kept gathered", "evaluate:rank0:kill@step4#0,step.update:rank1:kill@step8#1"),
        ("cut", "step.forward:rank1:kill@step7#0"),
    ],
)
def test_killed_it_ends_with_every_bit_of_a_run_never_killed(layout, faults, undisturbed, runs):
    runs.run(faults, *LAYOUTS[layout])
    calm = undisturbed[layout].folder
    assert len([i for i in runs.incidents if i.error_type == "Killed"]) == faults.count("kill")
    assert final_digest(runs.folder) == final_digest(calm)
    assert losses(runs.folder) == losses(calm)
    assert sorted(ledger(runs.folder)) == list(range(STEPS))


@pytest.mark.parametrize(
    ("layout", "fault", "phase"),
    [
        ("sharded", "step.backward:rank1:hang@step7", "backward"),
        ("cut", "step.forward:rank1:stop@step7", "forward"),
        ("cut", "step.forward:rank1:hang@step1", "forward"),  # while the step is counted
    ],
)
def test_a_hung_rank_is_named_and_not_those_that_wait_inside_a_gather(layout, fault, phase, runs):
    runs.run(fault, *LAYOUTS[layout], "--launch.hang_timeout=4")
    hang = runs.incidents[0]
    assert (hang.outcome, hang.rank, hang.step, hang.phase) == ("hang", 1, int(fault[-1]), phase)
    assert "the other ranks wait in" in hang.message


@pytest.mark.parametrize("layout", ["sharded", "cut"])
def test_what_is_not_finite_is_skipped_on_every_rank_and_named(layout, runs):
    skip = ("--numerics.on_nonfinite=skip", "--numerics.skip_budget=3")
    result = runs.run("step.backward:rank1:nan@step4", *LAYOUTS[layout], *skip)
    assert (result.steps, result.skipped) == (STEPS, 1)
    for rank in (0, 1):
        assert [e["step"] for e in runs.events("step", rank) if e.get("skipped")] == [4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_stops_all_ranks_at_one_step_after_a_checkpoint(layout, runs, undisturbed):
    """Whatever is gathered at that moment."""
    with pytest.raises(MeshwrightError, match="stopped by signal 15 before step 7, on every rank"):
        runs.run("step.forward:rank1:term@step6", *LAYOUTS[layout])
    assert runs.published()[0].step == 7
    runs.run("", *LAYOUTS[layout])
    assert final_digest(runs.folder) == final_digest(undisturbed[layout].folder)


def test_a_flipped_bit_in_what_ranks_hold_alike_is_found(runs):
    """The first parameter is cut; copies of shards hold it twice."""
    copies = ("--layout.shard=parameters", "--layout.shard_degree=2", "--launch.restarts=0")
    with pytest.raises(MeshwrightError, match=r"rank 3 differs|differ among the 2 replicas"):
        runs.run("step.fetch:rank3:flip@step4", *copies, "--numerics.compare_every=1", ranks=4)
