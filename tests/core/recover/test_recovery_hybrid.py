"""Pipeline, context and expert parallel runs recover from kills, hangs, failures and signals."""

from __future__ import annotations

import pytest

from meshwright.errors import MeshwrightError
from meshwright.prover.recovery import check_recovery
from tests.core.recover.recovery_runs import STEPS, config, final_digest, losses
from tests.kit.small_run import step_records

EXPERTS = ("--model.experts=4", "--model.router_bias_rate=0.01", "--layout.expert=2")
ZBV = ("--layout.pipeline=2", "--batch.micro=4", "--pipeline.schedule=zbv", "--model.layers=4", "--model.tie=true")
LAYOUTS = {
    "pipeline": ("--layout.pipeline=2", "--batch.micro=4", "--model.tie=true"),
    "zbv": ZBV,
    "ring": ("--layout.context=2",),
    "all-to-all": ("--layout.context=2", "--context.method=all-to-all"),
    "experts": EXPERTS,
}


def assert_equals_undisturbed(runs, expected_folder):
    assert final_digest(runs.folder) == final_digest(expected_folder)  # parameters, moments and router biases
    assert losses(runs.folder) == losses(expected_folder)
    for rank in (0, 1):
        ours, theirs = step_records(runs.folder, rank), step_records(expected_folder, rank)
        assert sorted(ours) == list(range(STEPS))
        for key in ("grad_norm", "tokens", "noise_scale", "experts"):
            assert [ours[s].get(key) for s in ours] == [theirs[s].get(key) for s in ours], (rank, key)


KILLS = [
    pytest.param(
        "pipeline",
        "step.forward:rank1:kill@step5#0,step.backward:rank0:kill@step7#1,save.write:rank1:kill@step9#2",
        marks=pytest.mark.long,
    ),
    ("zbv", "step.sync:rank0:kill@step7#0,evaluate:rank1:kill@step9#1"),
    ("experts", "step.backward:rank1:kill@step7#0,save.after_shard:rank0:kill@step9#1"),
    pytest.param("ring", "step.forward:rank1:kill@step7#0,step.update:rank0:kill@step8#1", marks=pytest.mark.long),
    pytest.param(
        "pipeline",
        "step.update:rank1:kill@step4#0,save.before_publish:rank0:kill@step6#1,step.updated:rank0:kill@step7#2",
        marks=pytest.mark.long,
    ),
    pytest.param("zbv", "step.backward:rank1:kill@step4#0,step.forward:rank0:kill@step8#1", marks=pytest.mark.long),
    pytest.param("all-to-all", "step.backward:rank0:kill@step7", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "faults"), KILLS)
def test_killed_run_ends_bitwise_equal_to_undisturbed_run(layout, faults, undisturbed, runs):
    runs.run(faults, *LAYOUTS[layout])
    found = [(i.rank, i.phase) for i in runs.incidents if i.error_type == "Killed"]
    assert [rank for rank, _ in found] == [int(fault.split(":rank")[1][0]) for fault in faults.split(",")]
    assert_equals_undisturbed(runs, undisturbed(layout))


HANGS = [
    ("pipeline", "step.backward:rank1:hang@step7", "backward"),  # the first stage waits for a gradient
    ("experts", "step.backward:rank0:hang@step7", "backward"),
    pytest.param("pipeline", "step.sync:rank0:hang@step7", "sync", marks=pytest.mark.long),  # between two passes
    pytest.param("ring", "step.forward:rank1:hang@step7", "forward", marks=pytest.mark.long),
    pytest.param("zbv", "step.forward:rank0:stop@step7", "forward", marks=pytest.mark.long),
    pytest.param("zbv", "step.sync:rank1:spin@step7", "sync", marks=pytest.mark.long),
    pytest.param("pipeline", "step.forward:rank0:hang@step1", "forward", marks=pytest.mark.long),  # on a counted step
    pytest.param("ring", "step.backward:rank0:hang@step1", "backward", marks=pytest.mark.long),
    pytest.param("experts", "step.forward:rank1:stop@step1", "forward", marks=pytest.mark.long),
    pytest.param("all-to-all", "step.forward:rank1:hang@step7", "forward", marks=pytest.mark.long),
    pytest.param("pipeline", "evaluate:rank0:hang@step4", "evaluate", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "fault", "phase"), HANGS)
def test_hung_rank_is_named_not_the_ranks_that_wait_for_it(layout, fault, phase, runs):
    with pytest.raises(MeshwrightError):
        runs.run(fault, *LAYOUTS[layout], "--launch.hang_timeout=3", "--launch.restarts=0")
    hang = runs.incidents[0]
    rank, step = int(fault.split(":rank")[1][0]), int(fault.split("@step")[1])
    assert (hang.outcome, hang.rank, hang.step, hang.phase) == ("hang", rank, step, phase), hang.message
    assert "the other ranks wait in" in hang.message
    assert "in perform" in hang.stack or "stop" in fault


@pytest.mark.parametrize(
    "layout", ["zbv", *(pytest.param(name, marks=pytest.mark.long) for name in ("experts", "ring"))]
)
def test_sigterm_stops_all_ranks_at_one_step_after_a_checkpoint(layout, runs, undisturbed):
    with pytest.raises(MeshwrightError, match="stopped by signal 15 before step 7, on every rank") as stopped:
        runs.run("step.backward:rank1:term@step6", *LAYOUTS[layout])
    assert stopped.value.exit_code == 143
    assert runs.published()[0].step == 7
    runs.run("", *LAYOUTS[layout])
    assert_equals_undisturbed(runs, undisturbed(layout))


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("pipeline", 0),  # the stage that computes no loss
        ("experts", 1),
        pytest.param("pipeline", 1, marks=pytest.mark.long),
        pytest.param("zbv", 1, marks=pytest.mark.long),
        pytest.param("ring", 1, marks=pytest.mark.long),
    ],
)
def test_nonfinite_gradient_is_skipped_on_every_rank(layout, rank, runs):
    skip = ("--numerics.on_nonfinite=skip", "--numerics.skip_budget=3")
    result = runs.run(f"step.backward:rank{rank}:nan@step4", *LAYOUTS[layout], *skip)
    assert (result.steps, result.skipped) == (STEPS, 1)
    for each in (0, 1):
        assert [e["step"] for e in runs.events("step", each) if e.get("skipped")] == [4]


@pytest.mark.parametrize(
    "fault",
    ["step.forward:rank1:raise@step7", pytest.param("step.backward:rank2:raise@step7", marks=pytest.mark.long)],
)
def test_failed_rank_is_the_root_cause_not_a_rank_that_lost_it_inside_a_stage(fault, runs):
    """torch wraps exceptions that are raised inside a stage, such as the loss of a peer in a ring."""
    with pytest.raises(MeshwrightError, match="injected at"):
        runs.run(fault, *LAYOUTS["pipeline"], "--layout.context=2", "--launch.restarts=0", ranks=4)
    rank = int(fault.split(":rank")[1][0])
    assert (runs.incidents[0].rank, runs.incidents[0].error_type) == (rank, "InjectedFault")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, LAYOUTS["zbv"]),
        (4, ("--layout.context=2", "--layout.shard=parameters")),
        (4, (*LAYOUTS["pipeline"], *EXPERTS)),
    ],
)
def test_prove_recovery_passes_on_hybrid_layouts(ranks, options):
    for claim, passed, measured in check_recovery(config(*options, ranks=ranks)):
        assert passed, (claim, measured)
