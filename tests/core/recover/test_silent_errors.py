"""Silent errors: flipped bits, non-finite values, out of memory, and bad samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright import train
from meshwright.core.checkpoint.unsharded import read_full_tensor, to_float64
from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import FaultySource, config, final_digest


def test_nan_loss_stops_all_ranks_at_one_step_and_is_never_published(runs):
    with pytest.raises(MeshwrightError, match=r"step 7: loss nan") as stopped:
        runs.run("step.backward:rank1:nan@step7")
    assert stopped.value.exit_code == 7
    assert len(runs.incidents) == 1  # a restart would fail again
    assert [entry.step for entry in runs.published()] == [6, 3]
    for entry in runs.published():
        for name, record in entry.manifest.tensors.items():
            assert np.isfinite(to_float64(read_full_tensor(entry, name), record.dtype)).all()
    runs.run()
    runs.assert_equals_undisturbed_run()


def test_nonfinite_state_is_never_published(runs, small, tmp_path):
    # Independent of the policy for non-finite losses.
    from meshwright.core.launch.ranks import run_ranks

    messages = run_ranks(save_with_nan, 2, tmp_path)
    assert all("is not finite, and nothing was published" in message for message in messages)
    assert any("model/b" in message for message in messages)  # on the rank that saves it
    assert not list(tmp_path.rglob("manifest.json"))


def save_with_nan(world, folder):
    from meshwright.base.checkpoint.listing import RunLineage
    from meshwright.base.config import CheckpointConfig
    from meshwright.base.store.posix import PosixStore
    from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver

    state = {"model/a": torch.ones(3), "model/b": torch.tensor([1.0, float("nan")])}
    facts = {"layout": {}, "identity": {}, "made_by": {}}
    saver = CheckpointSaver(
        CheckpointConfig(), PosixStore(folder), world, RunLineage("r", 1, {}), 1, facts, lambda: state
    )
    common = {"data": {}, "rng": {}, "schedule": {}, "scaler": {}, "counters": {}}
    (saved,) = saver.save(CheckpointMetadata(1, common, f"data/{world.rank}", {}), wait=True)
    assert saved.error is not None
    assert saved.error.exit_code == 7
    return str(saved.error)


def test_out_of_memory_on_one_rank_is_named_and_the_job_restarts(runs):
    runs.run("step.forward:rank1:oom@step7")
    incident = runs.incidents[0]
    assert (incident.rank, incident.error_type, incident.phase) == (1, "MemoryError", "forward")
    assert "MemoryError" in incident.stack
    runs.assert_equals_undisturbed_run()


def test_flipped_bit_names_the_differing_replica_and_is_never_published(runs):
    runs.run("step.fetch:rank1:flip@step7", "--numerics.compare_every=1", "--batch.global=24", ranks=3)
    incident = runs.incidents[0]
    assert (incident.rank, incident.error_type, incident.step) == (1, "ReplicaError", 7)
    assert "rank 1 differs from the 3 replicas" in incident.message
    assert runs.events("restored")[0]["step"] == 6
    disturbed, runs.folder = runs.folder, runs.folder.with_name("undisturbed")
    runs.run("", "--batch.global=24", ranks=3)
    assert final_digest(disturbed) == final_digest(runs.folder)


def test_flipped_bit_is_found_before_a_checkpoint_without_compare_every(runs):
    # If two replicas differ, Meshwright reports both; it cannot tell which one is wrong. It publishes neither.
    runs.run("step.fetch:rank1:flip@step7", "--numerics.compare_every=0")
    assert "replicas hold different parameters" in runs.incidents[0].message
    assert runs.incidents[0].checkpoint_step == 6
    runs.assert_equals_undisturbed_run()


def go(runs, bad: dict[int, str], *overrides: str):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256))

    def loss(out, y):
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)

    given = {"model": model, "loss": loss, "source": FaultySource(bad)}
    return train(config("--eval.every=0", *overrides), run=runs.folder, quiet=True, **given)


def victim(runs, step: int) -> tuple[int, list[int]]:
    """The first sample of rank 1 in a step, and all of its samples in that step."""
    from meshwright.core.data.sample_lookup import open_sample_lookup

    go(runs, {})
    samples = [int(s) for s in open_sample_lookup(runs.folder).show(step, 1)["samples"]]
    runs.folder = runs.folder.with_name("poisoned")
    return samples[0], samples


@pytest.mark.parametrize("how", ["hangs", "crashes"])
def test_sample_that_hangs_or_crashes_twice_stops_the_job_as_data_dependent(runs, how):
    sample, samples = victim(runs, 7)
    with pytest.raises(
        MeshwrightError, match=rf"data-dependent: failed again at step 7; inspect samples {sample}, "
    ) as failed:
        go(runs, {sample: how}, "--launch.hang_timeout=2")
    assert str(sample) in str(failed.value)
    first, second = runs.incidents
    assert first.samples == second.samples == samples
    assert (second.rank, second.step, second.phase, second.verdict) == (1, 7, "fetch", "data-dependent")


def test_quarantined_sample_counts_once_after_a_restart(runs):
    # The rule is the same on every rank and after a resume, and the counter is part of the checkpoint.
    sample, _ = victim(runs, 2)
    other = sample + 1 if sample % 2 == 0 else sample - 1
    quarantine = ("--data.on_bad_sample=quarantine", "--data.bad_sample_budget=5")
    runs.monkeypatch.setenv("MESHWRIGHT_FAULT", "step.forward:rank0:kill@step7")
    disturbed = go(runs, {sample: "raises", other: "raises"}, *quarantine)
    runs.folder = runs.folder.with_name("undisturbed")
    runs.monkeypatch.setenv("MESHWRIGHT_FAULT", "")
    assert go(runs, {sample: "raises", other: "raises"}, *quarantine).parameters_digest == disturbed.parameters_digest
    manifests = [sorted(folder.glob("checkpoints/*/manifest.json"))[-1] for folder in (disturbed.folder, runs.folder)]
    import json

    counted = [json.loads(path.read_bytes())["counters"]["bad_samples"] for path in manifests]
    assert counted[0] == counted[1] > 0


class Stateful(torch.nn.Module):
    """A model with stateful buffers: BatchNorm over the tokens of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.norm(hidden.flatten(0, 1)).reshape(hidden.shape))


@pytest.mark.parametrize("fault", ["step.forward:rank1:kill@step7", "step.forward:rank0:term@step7"])
def test_batchnorm_buffers_resume_bitwise_after_a_kill_and_after_a_signal(runs, fault):
    def run():
        torch.manual_seed(1)

        def loss(out, y):
            return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")

        given = {"model": Stateful(), "loss": loss, "source": FaultySource({})}
        return train(config("--eval.every=0"), run=runs.folder, quiet=True, **given)

    run()
    undisturbed, runs.folder = final_digest(runs.folder), runs.folder.with_name("disturbed")
    runs.monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
    if "term" in fault:
        with pytest.raises(MeshwrightError, match="stopped by signal 15"):
            run()
        runs.monkeypatch.setenv("MESHWRIGHT_FAULT", "")
    run()
    assert final_digest(runs.folder) == undisturbed
