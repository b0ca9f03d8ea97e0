"""Resume: at any step, on any number of ranks, as a fork, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.config import RunConfig, fingerprint, identity
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.state import dtype_name, tensor_bytes
from meshwright.core.checkpoint.unsharded import digest_of_lines, state_digest, tensor_digest_line
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.trainer.identity import describe_differences
from meshwright.core.trainer.loop import Training
from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import STEPS, config, final_digest, losses
from tests.kit.small_run import step_records


def stopped_at(runs, step: int, *overrides: str, ranks: int = 2) -> None:
    with pytest.raises(MeshwrightError, match=f"before step {step}"):
        runs.run(f"step.fetch:rank0:term@step{step}", *overrides, ranks=ranks)


@pytest.mark.parametrize("step", [0, STEPS - 1, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 5))])
def test_run_resumes_at_any_step_also_twice_in_a_row(runs, step):
    # at step 0, at the last step, in the middle
    stopped_at(runs, step)
    stopped_at(runs, step)
    runs.run()
    assert [event["step"] for event in runs.events("restored")] == [step, step]
    runs.assert_equals_undisturbed_run()


def test_run_resumes_at_the_end_of_an_epoch(runs):
    # 56 samples, none held out, 8 per step: step 7 begins the second epoch.
    epoch = ("--data.samples=56", "--batch.global=8", "--eval.holdout=0")
    stopped_at(runs, 7, *epoch)
    runs.run("", *epoch)
    disturbed, runs.folder = runs.folder, runs.folder.with_name("undisturbed")
    runs.run("", *epoch)
    assert losses(disturbed) == losses(runs.folder)
    assert final_digest(disturbed) == final_digest(runs.folder)


def test_complete_run_runs_no_further_step(runs):
    first = runs.run()
    before = {path: path.stat().st_mtime_ns for path in runs.folder.glob("checkpoints/*/*")}
    again = runs.run()
    assert again.parameters_digest == first.parameters_digest
    assert (again.steps, again.loss, again.evaluations) == (STEPS, first.loss, first.evaluations)
    assert len(runs.events("step")) == STEPS
    assert runs.events("end")[-1]["was_complete"]
    assert {path: path.stat().st_mtime_ns for path in runs.folder.glob("checkpoints/*/*")} == before


def unsharded(world, job):
    training = Training(job, world)
    state = {name: local_shard(tensor).local for name, tensor in training.state().items()}
    lines = [tensor_digest_line(name, dtype_name(t), t.shape, tensor_bytes(t)) for name, t in state.items()]
    training.signals.close()
    return training.done, digest_of_lines(lines)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2, 8))])
def test_checkpoint_of_four_ranks_loads_bitwise_on_any_rank_count_and_keeps_the_sample_order(runs, ranks):
    # 24 samples per step divide over 1, 2, 3, 4 and 8 ranks
    batch = ("--batch.global=24", "--precision.compute=fp64")
    stopped_at(runs, 6, *batch, ranks=4)
    entry = runs.published()[0]
    assert entry.manifest.layout["replicate"] == 4
    job = make_job(config(*batch, ranks=ranks), RunFolder(runs.folder))
    assert run_ranks(unsharded, ranks, job) == [(6, state_digest(entry))] * ranks
    runs.run("", *batch, ranks=ranks)
    resharded, runs.folder = runs.folder, runs.folder.with_name("undisturbed")
    runs.run("", *batch, ranks=4)
    curves = [
        [record["loss"] for _, record in sorted(step_records(folder).items())] for folder in (resharded, runs.folder)
    ]
    assert sorted(step_records(resharded)) == list(range(STEPS))
    assert np.allclose(*curves, rtol=1e-10)  # in float64 only the order of the sums differs
    changes = runs_events(resharded, "restored")[-1]["changes"]
    assert any("replicate was 4 and is" in change for change in changes)


def runs_events(folder, kind):
    return [e for e in read_events(RunFolder(folder).events(0)) if e["kind"] == kind]


def test_global_batch_that_the_new_rank_count_does_not_divide_is_refused(runs):
    from meshwright.errors import ConfigError

    stopped_at(runs, 6)
    with pytest.raises(ConfigError, match=r"is not divisible by the data-parallel degree 3.*degree .* of 1, 2, 4, 8"):
        runs.run(ranks=3)


CHANGES = {
    "--seed=7": "seed was 0 and is 7",
    "--data.samples=501": "data.samples was 500 and is 501",
    "--model.width=64": "model.width was 32 and is 64",
    "--model.tie=true": "model.tie was False and is True",
    "--precision.compute=fp64": "precision.compute was 'fp32' and is 'fp64'",
    "--schedule.kind=linear": "schedule.kind was 'cosine' and is 'linear'",
    "--optimizer.lr=0.001": "optimizer.lr was 0.003 and is 0.001",
    "--batch.global=8": "batch.global was 16 and is 8",
}


def test_resume_with_another_identity_is_refused_with_both_values(runs):
    stopped_at(runs, 6)
    for override, message in CHANGES.items():
        with pytest.raises(MeshwrightError) as refused:
            runs.run("", override)
        assert refused.value.exit_code == 3
        assert message in str(refused.value)
        assert [entry.step for entry in runs.published()] == [6, 3]


def test_manifest_of_another_run_is_refused_though_identity_json_matches(runs):
    # The identity file of another run is in the folder.
    stopped_at(runs, 6)
    path = runs.folder / "identity.json"
    known = json.loads(path.read_text())
    known["identity"]["seed"] = 7
    known["identity_fingerprint"] = fingerprint(known["identity"])
    path.write_text(json.dumps(known))
    with pytest.raises(MeshwrightError, match="seed was 0 and is 7") as refused:
        runs.run("", "--seed=7")
    assert refused.value.exit_code == 3


def test_fork_continues_as_a_new_timeline_and_its_restarts_stay_on_it(runs):
    stopped_at(runs, 6)
    runs.run("step.forward:rank1:kill@step10", "--optimizer.lr=0.001", fork=True)
    restored = [(event["step"], event["checkpoint"]) for event in runs.events("restored")]
    assert restored == [(6, "step-00000006.a0001"), (9, "step-00000009.a0002")]
    known = json.loads((runs.folder / "identity.json").read_text())
    assert (known["timeline"], known["until"]) == (2, {"1": 6})
    newest = runs.published()[0].manifest
    assert (newest.timeline, newest.step) == (2, STEPS)
    assert newest.identity["optimizer.lr"] == 0.001


def test_fork_killed_at_its_start_is_made_exactly_once(runs):
    stopped_at(runs, 6)
    runs.run("start.begin:rank0:kill#0,start.restored:rank1:kill#1", "--optimizer.lr=0.001", fork=True)
    assert json.loads((runs.folder / "identity.json").read_text())["timeline"] == 2
    assert runs.published()[0].manifest.timeline == 2


def test_fork_ignores_later_checkpoints_of_its_parent(runs):
    runs.run("", "--checkpoint.keep=10")
    for step in (9, 12):
        shutil.rmtree(runs.folder / "checkpoints" / f"step-{step:08d}.a0001")
    with pytest.raises(MeshwrightError, match="before step 8"):
        runs.run("step.fetch:rank0:term@step8", "--optimizer.lr=0.001", "--checkpoint.keep=10", fork=True)
    assert json.loads((runs.folder / "identity.json").read_text())["until"] == {"1": 6}


def test_fork_with_another_model_shape_is_refused(runs):
    stopped_at(runs, 6)
    with pytest.raises(MeshwrightError, match="is of another model") as refused:
        runs.run("", "--model.width=64", fork=True)
    assert refused.value.exit_code == 3


def test_resume_with_another_torch_or_code_is_recorded(runs, monkeypatch):
    stopped_at(runs, 6)
    monkeypatch.setattr("meshwright.core.trainer.resume.code_fingerprint", lambda: "another")
    runs.run()
    (restored,) = runs.events("restored")
    assert any(
        re.fullmatch(r"the source code of Meshwright changed \(hash \w{8} -> another\)", c) for c in restored["changes"]
    )


def test_resume_with_changed_data_is_refused(runs, tmp_path):
    file = tmp_path / "tokens.bin"
    tokens = np.arange(20_000, dtype=np.uint16) % 256
    tokens.tofile(file)
    data = ("--data.kind=tokens", f"--data.path={file}")
    stopped_at(runs, 6, *data)
    tokens[12_345] ^= 1
    tokens.tofile(file)
    with pytest.raises(MeshwrightError, match=r"the content of data source 0 .* changed") as refused:
        runs.run("", *data)
    assert refused.value.exit_code == 3
    file.unlink()
    with pytest.raises(Exception, match=r"tokens\.bin") as missing:
        runs.run("", *data)
    assert missing.value.exit_code in (2, 6)
    tokens[12_345] ^= 1
    tokens.tofile(file)
    runs.run("", *data)
    assert sorted(step_records(runs.folder)) == list(range(STEPS))


def test_damaged_checkpoint_is_named_and_an_older_one_is_loaded(runs):
    stopped_at(runs, 6)
    shard = runs.folder / "checkpoints" / "step-00000006.a0001" / "rank-00001.shard"
    spoilt = bytearray(shard.read_bytes())
    spoilt[5000] ^= 1
    shard.write_bytes(spoilt)
    with pytest.raises(MeshwrightError, match=r"a0001 is damaged: rank-00001.shard chunk 0: expected") as ended:
        runs.run(fallback=False)
    assert ended.value.exit_code == 4
    runs.run()
    assert runs.events("damaged")[-1]["damage"][0]["file"] == "rank-00001.shard"
    assert runs.events("restored")[-1]["step"] == 3
    assert losses(runs.folder) == losses(runs.golden(2))
    assert final_digest(runs.folder) == final_digest(runs.golden(2))


def test_run_without_an_intact_checkpoint_does_not_start_from_scratch(runs):
    stopped_at(runs, 6)
    for manifest in runs.folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(MeshwrightError, match=r"none of 2 checkpoint\(s\) is intact") as ended:
        runs.run()
    assert ended.value.exit_code == 4
    assert len(runs.events("step")) == 6


@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_full_or_broken_disk_only_loses_the_save(runs, action):
    runs.run(f"save.write:rank1:{action}@step6")
    (failed,) = runs.events("save_failed")
    assert failed["step"] == 6
    assert "rank 1: checkpoints/step-00000006.a0001 was not saved" in failed["message"]
    assert [incident.outcome for incident in runs.incidents] == ["complete"]
    assert [entry.step for entry in runs.published()] == [12, 9, 3]
    runs.assert_equals_undisturbed_run()


def test_on_failure_stop_ends_the_run_after_a_failed_save(runs):
    with pytest.raises(MeshwrightError, match="was not saved: No space left on device") as stopped:
        runs.run("save.write:rank1:enospc@step6", "--checkpoint.on_failure=stop")
    assert stopped.value.exit_code == 4
    runs.run()
    runs.assert_equals_undisturbed_run()


def test_run_whose_last_save_fails_is_not_complete(runs):
    # The run folder disappears during the run.
    with pytest.raises(MeshwrightError, match=r"step-00000012.a0001 was not saved") as stopped:
        runs.run("save.before_manifest:rank0:eio@step12")
    assert stopped.value.exit_code == 4
    assert [entry.step for entry in runs.published()] == [9, 6, 3]
    runs.run()
    runs.assert_equals_undisturbed_run()


def test_last_save_that_fails_after_it_was_published_is_not_overwritten(runs):
    with pytest.raises(MeshwrightError, match=r"step-00000012.a0001 is published, although its save failed") as stopped:
        runs.run("save.after_publish:rank0:eio@step12")
    assert stopped.value.exit_code == 4
    runs.run()
    runs.assert_equals_undisturbed_run()


def test_slow_disk_skips_saves_and_has_one_in_flight(runs):
    runs.run("save.begin:slow=0.4", "--checkpoint.mode=async", "--checkpoint.every=1")
    saves = runs.events("checkpoint")
    assert sum(save["skipped"] for save in saves) > 0
    assert len(saves) + sum(save["skipped"] for save in saves) >= STEPS - 1
    assert losses(runs.folder) == losses(runs.golden(2))
    assert final_digest(runs.folder) == final_digest(runs.golden(2))


def test_async_checkpoint_has_the_state_of_its_own_step(runs):
    runs.run("", "--checkpoint.mode=async", "--checkpoint.every=1", "--checkpoint.keep=100")
    sync, runs.folder = runs.folder, runs.folder.with_name("sync")
    runs.run("", "--checkpoint.every=1", "--checkpoint.keep=100")
    exact = {entry.step: state_digest(entry) for entry in runs.published()}
    for entry in list_published(open_run_store(RunFolder(sync))):
        assert state_digest(entry) == exact[entry.step]


def test_checkpoints_without_identity_json_are_refused(runs):
    stopped_at(runs, 6)
    (runs.folder / "identity.json").unlink()
    with pytest.raises(MeshwrightError, match=r"none of 2 checkpoint\(s\) belongs to this run") as ended:
        runs.run()
    assert ended.value.exit_code == 4


def test_read_error_while_acquiring_the_lease_loses_no_checkpoint(runs, monkeypatch):
    stopped_at(runs, 6)
    from meshwright.base.store.posix import PosixCalls
    from meshwright.core.recover.lease import acquire_lease

    real = PosixCalls.read

    def broken(self, path, start, length):
        if path.endswith("manifest.json"):
            raise OSError(5, "Input/output error")
        return real(self, path, start, length)

    with monkeypatch.context() as patch:
        patch.setattr(PosixCalls, "read", broken)
        acquire_lease(RunFolder(runs.folder))
    assert [entry.step for entry in runs.published()] == [6, 3]


def test_identity_without_a_newer_setting_matches_its_default():
    now = identity(RunConfig())
    before = {key: value for key, value in now.items() if not key.startswith("model.experts")}
    assert describe_differences(before, now) == ""
    assert "model.experts_shared was 0 and is 2" in describe_differences(before, now | {"model.experts_shared": 2})
