"""Killed at any phase of a run, once or twenty times, it ends as if nothing had happened (K1 to K12)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from recovering import config, final_digest, losses

from meshwright import train
from meshwright.errors import MeshwrightError, RestartsExhausted

STEP_POINTS = [  # K1, K2
    "step.fetch:rank1:kill@step7",
    "step.copy:rank0:kill@step7",
    "step.forward:rank1:kill@step7",
    "step.backward:rank0:kill@step7",
    "step.sync:rank1:kill@step7",
    "step.update:rank0:kill@step7",
    "step.updated:rank1:kill@step7",
    "evaluate:rank1:kill@step4",
    "end:rank0:kill",
]
SAVE_POINTS = [  # K3, K4, K5, K6, K7, K9
    "save.stage:rank1:kill@step6",
    "save.begin:rank0:kill@step6",
    "save.write:rank1:kill@step6",
    "save.after_shard:rank1:kill@step6",
    "save.before_manifest:rank0:kill@step6",
    "save.before_publish:rank0:kill@step6",
    "save.after_publish:rank0:kill@step6",
    "retain.unpublished:rank0:kill@step3",
]


@pytest.mark.parametrize("fault", STEP_POINTS + SAVE_POINTS)
def test_a_rank_killed_at_any_point_does_not_change_the_result(runs, fault):
    overrides = ("--checkpoint.keep=1",) if "retain" in fault else ()
    runs.run(fault, *overrides)
    first, *_ = runs.incidents
    assert (first.outcome, first.error_type) == ("failed", "Killed")
    assert f"rank{first.rank}:" in fault
    assert runs.incidents[-1].outcome == "complete"
    runs.assert_as_if_undisturbed()


@pytest.mark.parametrize("fault", ["start.restore:rank0:killx2", "start.restored:rank1:killx2"])
def test_a_kill_during_the_load_changes_nothing_on_disk(runs, fault):
    # K8: the first launch has nothing to load; its restart is killed in the load, and the next one loads the same.
    runs.run(f"step.forward:rank1:kill@step7,{fault}")
    assert [incident.checkpoint_step for incident in runs.incidents] == [6, 6, 12]
    assert runs.incidents[1].phase == "restore"
    runs.assert_as_if_undisturbed()


def test_a_run_killed_in_every_recovery_stops_loudly_and_resumes_when_it_is_let(runs):
    # K11
    with pytest.raises(RestartsExhausted, match=r"3 restart\(s\) got no further than step 6") as stopped:
        runs.run("step.forward:rank1:kill@step7,start.restored:rank0:killx50", "--launch.restarts=3")
    assert stopped.value.exit_code == 5
    assert len(runs.incidents) == 4  # the first failure had got to step 6; three restarts got no further
    runs.run()
    runs.assert_as_if_undisturbed()


@pytest.mark.long
def test_twenty_kills_in_a_row_during_recovery_are_survived(runs):
    # K11
    runs.run("step.forward:rank1:kill@step7,start.begin:rank0:killx21", "--launch.restarts=30")
    assert len(runs.incidents) == 22
    runs.assert_as_if_undisturbed()


def test_without_restarts_a_killed_rank_ends_the_job_and_the_next_launch_resumes(runs):
    with pytest.raises(MeshwrightError, match="rank 1 was ended by signal 9") as failed:
        runs.run("step.forward:rank1:kill@step7", "--launch.restarts=0")
    assert failed.value.exit_code == 8
    runs.run()
    assert runs.events("restored")[0]["step"] == 6
    runs.assert_as_if_undisturbed()


def test_three_ranks_resume_bitwise_though_ddp_would_have_other_buckets(runs):
    # Three summands make the order of a sum visible in its bits.
    runs.run("step.backward:rank2:kill@step7", "--batch.global=24", ranks=3)
    disturbed = runs.folder
    runs.folder = disturbed.with_name("undisturbed")
    runs.run("", "--batch.global=24", ranks=3)
    assert losses(disturbed) == losses(runs.folder)
    assert final_digest(disturbed) == final_digest(runs.folder)


class KillsItsWorker:
    """A source that ends, once, the worker that decodes for it."""

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


def test_a_killed_data_worker_fails_its_rank_and_the_restart_reads_the_same(runs, tmp_path):
    # K12
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")

    def go(name: str, mark: Path) -> str:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256))
        workers = ("--data.workers=2", "--data.worker_kind=process")
        given = {"model": model, "loss": loss, "source": KillsItsWorker(mark)}
        return train(config(*workers), run=tmp_path / name, quiet=True, **given).parameters_digest

    done = tmp_path / "done"
    done.touch()
    undisturbed = go("undisturbed", done)
    runs.folder = tmp_path / "disturbed"
    assert go("disturbed", tmp_path / "mark") == undisturbed
    assert "DataLoader worker" in runs.incidents[0].message
    assert runs.incidents[-1].outcome == "complete"  # in which phase torch's handler finds the rank is chance
