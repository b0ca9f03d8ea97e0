"""The supervisor names a rank that stops, hangs, exits or is slow, with its step, phase and stack."""

from __future__ import annotations

import pytest

from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import STEPS

WATCHED = ("--launch.hang_timeout=3",)


@pytest.mark.parametrize(
    ("fault", "state", "phase"),
    [
        ("step.forward:rank1:stop@step7", "its process is stopped", "forward"),
        ("step.backward:rank1:spin@step7", "its process is busy", "backward"),
        ("step.update:rank1:lock@step7", "its process is sleeping", "update"),  # native code that holds the GIL
        ("step.fetch:rank1:hang@step7", "its process is sleeping", "fetch"),
    ],
)
def test_hung_rank_is_named_with_phase_and_stack_and_the_job_restarts(runs, fault, state, phase):
    runs.run(fault, *WATCHED)
    hang = runs.incidents[0]
    assert (hang.outcome, hang.rank, hang.step, hang.phase) == ("hang", 1, 7, phase)
    assert "rank 1 has made no progress for" in hang.message
    assert state in hang.message
    assert "the other ranks wait in" in hang.message
    assert "in train_rank" in hang.stack
    assert runs.supervisor_events("hang")[0]["rank"] == 1
    runs.assert_equals_undisturbed_run()


LONG_LAYOUTS = [
    pytest.param(layout, marks=pytest.mark.long)
    for layout in (["--layout.replicate=2"], ["--layout.replicate=1", "--layout.tensor=2"])
]


@pytest.mark.parametrize("layout", [["--layout.replicate=2", "--layout.shard=parameters"], *LONG_LAYOUTS])
def test_straggler_is_named_with_its_phase_and_the_run_continues(runs, tmp_path, layout):
    """Under FSDP2 and tensor parallelism the other rank waits inside forward, and is not slow itself."""
    from meshwright import train
    from tests.kit.small_run import small_config

    steps = 70
    config = small_config("--launch.straggler_ratio=2", "--checkpoint.mode=sync", *layout, steps=steps)
    runs.monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank1:slow=0.1")
    train(config, run=runs.folder, quiet=True)
    slow = runs.supervisor_events("straggler")
    assert slow
    assert {(event["rank"], event["phase"]) for event in slow} == {(1, "forward")}
    assert "rank 1 is slow" in slow[0]["message"]
    assert [incident.outcome for incident in runs.incidents] == ["complete"]


def test_ranks_in_different_collectives_are_named(runs):
    runs.run("step.collective:rank1:desync@step7", *WATCHED)
    message = runs.incidents[0].message
    assert "ranks entered different collectives" in message
    assert "'injected all-reduce' on rank 1" in message
    assert "'step control vector' on rank(s) 0" in message
    runs.assert_equals_undisturbed_run()


def test_rank_that_exits_early_fails_the_job(runs):
    with pytest.raises(MeshwrightError, match="rank 1 exited with status 0 and no report") as failed:
        runs.run("step.forward:rank1:exit@step7", "--launch.restarts=0")
    assert failed.value.exit_code == 1
    runs.run()
    runs.assert_equals_undisturbed_run()


@pytest.mark.parametrize(
    "fault",
    [
        "step.forward:rank1:term@step7",  # only one rank receives the signal
        "evaluate:rank1:term@step4",
        "step.fetch:rank0:slow=0.5@step7,step.sync:rank1:term@step6",  # while it waits for another rank
        "save.stage:rank0:term@step6",
    ],
)
def test_sigterm_to_one_rank_saves_a_checkpoint_on_all_ranks(runs, fault):
    with pytest.raises(MeshwrightError, match="stopped by signal 15 before step") as stopped:
        runs.run(fault)
    assert stopped.value.exit_code == 143
    assert runs.incidents[0].outcome == "stopped"
    newest = runs.published()[0]
    assert newest.step == int(str(stopped.value).split("before step ")[1].split(",")[0])
    runs.run()
    assert runs.events("restored")[0]["step"] == newest.step < STEPS
    runs.assert_equals_undisturbed_run()


def test_expired_grace_period_publishes_no_partial_checkpoint(runs):
    # Rank 0 never reaches the next step, so the ranks do not agree on a step; the last periodic checkpoint remains.
    from meshwright.core.recover.supervisor import GracePeriodExpired

    fault = "step.forward:rank1:term@step7,step.fetch:rank0:hang@step8"
    with pytest.raises(
        GracePeriodExpired, match="did not end within 1 s and were killed; the newest checkpoint is of step 6"
    ) as over:
        runs.run(fault, "--launch.grace_period=1")
    assert over.value.exit_code == 143
    assert [entry.step for entry in runs.published()] == [6, 3]
    runs.run()
    runs.assert_equals_undisturbed_run()


def test_job_that_fails_after_sigterm_does_not_restart(runs):
    with pytest.raises(MeshwrightError) as failed:
        runs.run("step.forward:rank0:term@step6,save.stage:rank1:raise@step7")
    assert failed.value.exit_code == 143
    assert len(runs.incidents) == 1
    runs.run()
    runs.assert_equals_undisturbed_run()


@pytest.mark.parametrize("fault", ["save.begin:rank1:kill@step12", "save.after_shard:rank1:kill@step12"])
def test_rank_killed_in_the_last_save_is_the_root_cause_and_the_job_restarts(runs, fault):
    runs.run(fault)
    assert (runs.incidents[0].rank, runs.incidents[0].error_type) == (1, "Killed")
    runs.assert_equals_undisturbed_run()


def test_stuck_async_save_is_reported_while_training_continues(runs):
    from meshwright import train
    from tests.kit.small_run import small_config

    saving = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--launch.hang_timeout=2")
    runs.monkeypatch.setenv("MESHWRIGHT_FAULT", "save.begin:rank0:slow=5@step2,step.update:slow=0.05")
    train(small_config(*saving, steps=150), run=runs.folder, quiet=True)
    assert "the save in flight has made no progress for" in runs.events("save_failed")[0]["message"]
    assert [incident.outcome for incident in runs.incidents] == ["complete"]


def test_rank_that_hangs_in_a_save_is_named(runs):
    runs.run("save.after_shard:rank1:hang@step6", *WATCHED)
    assert (runs.incidents[0].rank, runs.incidents[0].phase) == (1, "save")
    runs.assert_equals_undisturbed_run()


@pytest.mark.long
def test_slow_save_on_one_rank_is_not_a_hang(runs):
    runs.run("save.write:rank1:slow=0.4@step6", *WATCHED)
    assert [incident.outcome for incident in runs.incidents] == ["complete"]
    runs.assert_equals_undisturbed_run()
