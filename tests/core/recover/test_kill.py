"""A run that is killed at any phase, once or many times, ends bitwise equal to an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright import train
from meshwright.errors import MeshwrightError, RestartsExhausted
from tests.core.recover.recovery_runs import config, final_digest, losses

STEP_POINTS = [
    "evaluate:rank1:kill@step4",
    "step.fetch:rank1:kill@step5",
    "step.copy:rank0:kill@step6",
    "step.forward:rank1:kill@step7",
    "step.backward:rank0:kill@step8",
    "step.sync:rank1:kill@step9",
    "step.update:rank0:kill@step10",
    "step.updated:rank1:kill@step11",
    "end:rank0:kill",
]
"""Each at a step of its own: a rank that fails at one step again and again is not restarted."""
SAVE_POINTS = [
    "save.stage:rank1:kill@step6",
    "save.begin:rank0:kill@step6",
    "save.write:rank1:kill@step6",
    "save.after_shard:rank1:kill@step6",
    "save.after_part:rank1:kill@step6",
    "save.before_manifest:rank0:kill@step6",
    "save.before_publish:rank0:kill@step6",
    "save.after_publish:rank0:kill@step6",
]
RETAIN_POINT = "retain.unpublished:rank0:kill@step3"


@pytest.mark.parametrize("faults", [STEP_POINTS, SAVE_POINTS], ids=["in a step", "in a save"])
def test_run_killed_at_one_fail_point_after_the_other_ends_as_an_undisturbed_one(runs, faults):
    """Every attempt is killed at its own point, until none is left."""
    runs.run(",".join(f"{fault}#{restart}" for restart, fault in enumerate(faults)), "--launch.restarts=20")
    *killed, last = runs.incidents
    assert [(incident.outcome, incident.error_type) for incident in killed] == [("failed", "Killed")] * len(faults)
    assert [f"rank{incident.rank}" for incident in killed] == [fault.split(":")[1] for fault in faults]
    assert last.outcome == "complete"
    runs.assert_equals_undisturbed_run()


ALONE = [RETAIN_POINT, *(pytest.param(fault, marks=pytest.mark.long) for fault in STEP_POINTS + SAVE_POINTS)]


@pytest.mark.parametrize("fault", ALONE)
def test_rank_killed_at_any_fail_point_does_not_change_the_result(runs, fault):
    overrides = ("--checkpoint.keep=1",) if "retain" in fault else ()
    runs.run(fault, *overrides)
    first, *_ = runs.incidents
    assert (first.outcome, first.error_type) == ("failed", "Killed")
    assert f"rank{first.rank}:" in fault
    assert runs.incidents[-1].outcome == "complete"
    runs.assert_equals_undisturbed_run()


@pytest.mark.parametrize("fault", ["start.restore:rank0:killx2", "start.restored:rank1:killx2"])
def test_kill_while_restoring_changes_nothing_on_disk(runs, fault):
    # The first attempt has nothing to restore; the second is killed while restoring, and the third restores the same.
    runs.run(f"step.forward:rank1:kill@step7,{fault}")
    assert [incident.checkpoint_step for incident in runs.incidents] == [6, 6, 12]
    assert runs.incidents[1].phase == "restore"
    runs.assert_equals_undisturbed_run()


def test_restarts_exhausted_ends_the_job_and_the_next_launch_resumes(runs):
    with pytest.raises(RestartsExhausted, match=r"3 restart\(s\) got no further than step 6") as stopped:
        runs.run("step.forward:rank1:kill@step7,start.restored:rank0:killx50", "--launch.restarts=3")
    assert stopped.value.exit_code == 5
    assert len(runs.incidents) == 4  # the first attempt reached step 6; three restarts got no further
    runs.run()
    runs.assert_equals_undisturbed_run()


@pytest.mark.long
def test_twenty_kills_in_a_row_while_starting_are_recovered(runs):
    runs.run("step.forward:rank1:kill@step7,start.begin:rank0:killx21", "--launch.restarts=30")
    assert len(runs.incidents) == 22
    runs.assert_equals_undisturbed_run()


def test_killed_rank_without_restarts_ends_the_job_and_the_next_launch_resumes(runs):
    with pytest.raises(MeshwrightError, match="rank 1 was killed by signal 9") as failed:
        runs.run("step.forward:rank1:kill@step7", "--launch.restarts=0")
    assert failed.value.exit_code == 8
    runs.run()
    assert runs.events("restored")[0]["step"] == 6
    runs.assert_equals_undisturbed_run()


def test_ddp_on_three_ranks_resumes_bitwise(runs):
    # With three summands the order of a sum is visible in its bits.
    runs.run("step.backward:rank2:kill@step7", "--batch.global=24", ranks=3)
    disturbed = runs.folder
    runs.folder = disturbed.with_name("undisturbed")
    runs.run("", "--batch.global=24", ranks=3)
    assert losses(disturbed) == losses(runs.folder)
    assert final_digest(disturbed) == final_digest(runs.folder)


class WorkerKillingSource:
    """A source that kills, once, the data worker that reads from it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index % 10 == 0 and torch.utils.data.get_worker_info() and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = (np.arange(17) * (index + 3)) % 250
        return tokens[:-1], tokens[1:]


def test_killed_data_worker_fails_its_rank_and_the_restart_reads_the_same_samples(runs, tmp_path):
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")

    def go(name: str, mark: Path) -> str:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256))
        workers = ("--data.workers=2", "--data.worker_kind=process")
        given = {"model": model, "loss": loss, "source": WorkerKillingSource(mark)}
        return train(config(*workers), run=tmp_path / name, quiet=True, **given).parameters_digest

    done = tmp_path / "done"
    done.touch()
    undisturbed = go("undisturbed", done)
    runs.folder = tmp_path / "disturbed"
    assert go("disturbed", tmp_path / "mark") == undisturbed
    assert "DataLoader worker" in runs.incidents[0].message
    assert runs.incidents[-1].outcome == "complete"  # in which phase torch's handler finds the rank is chance
