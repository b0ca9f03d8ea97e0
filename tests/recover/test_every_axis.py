"""Pipelines, divided sequences and divided experts survive what copies survive."""

from __future__ import annotations

import pytest
from recovering import STEPS, Runs, config, final_digest, ledger, losses

from meshwright.errors import MeshwrightError
from meshwright.prover.recovery import check_recovery

EXPERTS = ("--model.experts=4", "--model.router_bias_rate=0.01", "--layout.expert=2")
ZBV = ("--layout.pipeline=2", "--batch.micro=4", "--pipeline.schedule=zbv", "--model.layers=4", "--model.tie=true")
LAYOUTS = {
    "pipeline": ("--layout.pipeline=2", "--batch.micro=4", "--model.tie=true"),
    "zbv": ZBV,
    "ring": ("--layout.context=2",),
    "all-to-all": ("--layout.context=2", "--context.method=all-to-all"),
    "experts": EXPERTS,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on a layout that nothing happens to, made once."""
    made: dict[str, Runs] = {}

    def get(name: str):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                made[name] = Runs(tmp_path_factory.mktemp("calm"), patch, lambda _: None)
                made[name].run("", *LAYOUTS[name])
        return made[name].folder

    return get


def assert_as_if_nothing_happened(runs, calm):
    assert final_digest(runs.folder) == final_digest(calm)  # parameters, moments and router biases
    assert losses(runs.folder) == losses(calm)
    for rank in (0, 1):
        ours, theirs = ledger(runs.folder, rank), ledger(calm, rank)
        assert sorted(ours) == list(range(STEPS))
        for key in ("grad_norm", "tokens", "noise_scale", "experts"):
            assert [ours[s].get(key) for s in ours] == [theirs[s].get(key) for s in ours], (rank, key)


KILLS = [
    (
        "pipeline",
        "step.forward:rank1:kill@step5#0,step.backward:rank0:kill@step7#1,save.write:rank1:kill@step9#2",
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
def test_killed_it_ends_with_every_bit_of_a_run_never_killed(layout, faults, undisturbed, runs):
    runs.run(faults, *LAYOUTS[layout])
    found = [(i.rank, i.phase) for i in runs.incidents if i.error_type == "Killed"]
    assert [rank for rank, _ in found] == [int(fault.split(":rank")[1][0]) for fault in faults.split(",")]
    assert_as_if_nothing_happened(runs, undisturbed(layout))


HANGS = [
    ("pipeline", "step.backward:rank1:hang@step7", "backward"),  # the first stage waits for a gradient
    ("pipeline", "step.sync:rank0:hang@step7", "sync"),  # between two passes
    ("ring", "step.forward:rank1:hang@step7", "forward"),
    ("experts", "step.backward:rank0:hang@step7", "backward"),
    pytest.param("zbv", "step.forward:rank0:stop@step7", "forward", marks=pytest.mark.long),
    pytest.param("zbv", "step.sync:rank1:spin@step7", "sync", marks=pytest.mark.long),
    pytest.param("pipeline", "step.forward:rank0:hang@step1", "forward", marks=pytest.mark.long),  # counted
    pytest.param("ring", "step.backward:rank0:hang@step1", "backward", marks=pytest.mark.long),
    pytest.param("experts", "step.forward:rank1:stop@step1", "forward", marks=pytest.mark.long),
    pytest.param("all-to-all", "step.forward:rank1:hang@step7", "forward", marks=pytest.mark.long),
    pytest.param("pipeline", "evaluate:rank0:hang@step4", "evaluate", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "fault", "phase"), HANGS)
def test_a_hung_rank_is_named_and_not_those_that_wait_for_its_message(layout, fault, phase, runs):
    with pytest.raises(MeshwrightError):
        runs.run(fault, *LAYOUTS[layout], "--launch.hang_timeout=3", "--launch.restarts=0")
    hang = runs.incidents[0]
    rank, step = int(fault.split(":rank")[1][0]), int(fault.split("@step")[1])
    assert (hang.outcome, hang.rank, hang.step, hang.phase) == ("hang", rank, step, phase), hang.message
    assert "the other ranks wait in" in hang.message
    assert "in act" in hang.stack or "stop" in fault


@pytest.mark.parametrize(
    "layout", ["zbv", *(pytest.param(name, marks=pytest.mark.long) for name in ("experts", "ring"))]
)
def test_a_signal_stops_all_ranks_at_one_step_after_a_checkpoint(layout, runs, undisturbed):
    with pytest.raises(MeshwrightError, match="stopped by signal 15 before step 7, on every rank") as stopped:
        runs.run("step.backward:rank1:term@step6", *LAYOUTS[layout])
    assert stopped.value.exit_code == 143
    assert runs.published()[0].step == 7
    runs.run("", *LAYOUTS[layout])
    assert_as_if_nothing_happened(runs, undisturbed(layout))


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("pipeline", 0),  # where no loss is computed
        ("experts", 1),
        pytest.param("pipeline", 1, marks=pytest.mark.long),
        pytest.param("zbv", 1, marks=pytest.mark.long),
        pytest.param("ring", 1, marks=pytest.mark.long),
    ],
)
def test_what_is_not_finite_is_skipped_on_every_rank(layout, rank, runs):
    skip = ("--numerics.on_nonfinite=skip", "--numerics.skip_budget=3")
    result = runs.run(f"step.backward:rank{rank}:nan@step4", *LAYOUTS[layout], *skip)
    assert (result.steps, result.skipped) == (STEPS, 1)
    for each in (0, 1):
        assert [e["step"] for e in runs.events("step", each) if e.get("skipped")] == [4]


@pytest.mark.parametrize(
    "fault",
    ["step.forward:rank1:raise@step7", pytest.param("step.backward:rank2:raise@step7", marks=pytest.mark.long)],
)
def test_a_rank_that_fails_is_blamed_and_not_one_that_lost_it_inside_a_stage(fault, runs):
    """torch wraps what happens there, and a lost neighbour of a ring happens there."""
    with pytest.raises(MeshwrightError, match="injected at") as failed:
        runs.run(fault, *LAYOUTS["pipeline"], "--layout.context=2", "--launch.restarts=0", ranks=4)
    rank = int(fault.split(":rank")[1][0])
    assert (runs.incidents[0].rank, runs.incidents[0].error_type) == (rank, "InjectedFault")
    assert [f.rank for f in failed.value.failures if not f.secondary] == [rank], failed.value.failures


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, LAYOUTS["zbv"]),
        (4, ("--layout.context=2", "--layout.shard=parameters")),
        (4, (*LAYOUTS["pipeline"], *EXPERTS)),
    ],
)
def test_the_proof_of_recovery_holds(ranks, words):
    for what, kept, measured in check_recovery(config(*words, ranks=ranks)):
        assert kept, (what, measured)
