"""Where a run goes on, on how many ranks, and what it refuses to go on with (C1 to C7, D1, D11, D12, N5)."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from recovering import STEPS, config, final_digest, ledger, losses

from meshwright.checkpoint.listing import list_published, open_run_store
from meshwright.checkpoint.state import dtype_name, tensor_bytes
from meshwright.checkpoint.unsharded import digest_of_lines, state_digest, tensor_digest_line
from meshwright.config import RunConfig, fingerprint, identity
from meshwright.errors import MeshwrightError
from meshwright.launch.job import make_job
from meshwright.launch.ranks import run_ranks
from meshwright.parallel.local_shard import local_shard
from meshwright.telemetry.events import read_events
from meshwright.telemetry.run_folder import RunFolder
from meshwright.trainer.identity import describe_differences
from meshwright.trainer.loop import Training


def stopped_at(runs, step: int, *overrides: str, ranks: int = 2) -> None:
    with pytest.raises(MeshwrightError, match=f"before step {step}"):
        runs.run(f"step.fetch:rank0:term@step{step}", *overrides, ranks=ranks)


@pytest.mark.parametrize("step", [0, 1, 5, STEPS - 1])
def test_a_run_resumes_at_any_step_also_twice_in_a_row(runs, step):
    # C7: at step 0, in the middle, at the last step
    stopped_at(runs, step)
    stopped_at(runs, step)
    runs.run()
    assert [event["step"] for event in runs.events("restored")] == [step, step]
    runs.assert_as_if_undisturbed()


def test_a_run_resumes_exactly_at_the_end_of_an_epoch(runs):
    # C7: 56 samples, none held out, 8 a step: step 7 begins the second epoch.
    epoch = ("--data.samples=56", "--batch.global=8", "--eval.holdout=0")
    stopped_at(runs, 7, *epoch)
    runs.run("", *epoch)
    disturbed, runs.folder = runs.folder, runs.folder.with_name("undisturbed")
    runs.run("", *epoch)
    assert losses(disturbed) == losses(runs.folder)
    assert final_digest(disturbed) == final_digest(runs.folder)


def test_a_complete_run_is_complete_and_makes_no_step(runs):
    # C7
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


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(8, marks=pytest.mark.long)])
def test_a_checkpoint_of_four_ranks_loads_bitwise_on_any_number_and_goes_on_in_the_same_order(runs, ranks):
    # C6: 24 samples a step divide over 1, 2, 3, 4 and 8 ranks
    batch = ("--batch.global=24", "--precision.compute=fp64")
    stopped_at(runs, 6, *batch, ranks=4)
    entry = runs.published()[0]
    assert entry.manifest.layout["replicate"] == 4
    job = make_job(config(*batch, ranks=ranks), RunFolder(runs.folder))
    assert run_ranks(unsharded, ranks, job) == [(6, state_digest(entry))] * ranks
    runs.run("", *batch, ranks=ranks)
    resharded, runs.folder = runs.folder, runs.folder.with_name("undisturbed")
    runs.run("", *batch, ranks=4)
    curves = [[record["loss"] for _, record in sorted(ledger(folder).items())] for folder in (resharded, runs.folder)]
    assert sorted(ledger(resharded)) == list(range(STEPS))
    assert np.allclose(*curves, rtol=1e-10)  # float64: the sums' order is all that differs
    changes = runs_events(resharded, "restored")[-1]["changes"]
    assert any("replicate was 4 and is" in change for change in changes)


def runs_events(folder, kind):
    return [e for e in read_events(RunFolder(folder).events(0)) if e["kind"] == kind]


def test_a_batch_that_does_not_divide_is_refused_with_the_degrees_that_do(runs):
    # C6
    from meshwright.errors import ConfigError

    stopped_at(runs, 6)
    with pytest.raises(ConfigError, match=r"does not divide over data-parallel degree 3.*degree 1, 2, 4, 8"):
        runs.run(ranks=3)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--seed=7", "seed was 0 and is 7"),  # C1
        ("--data.samples=501", "data.samples was 500 and is 501"),  # C2
        ("--model.width=64", "model.width was 32 and is 64"),  # C3
        ("--model.tie=true", "model.tie was False and is True"),  # C3
        ("--precision.compute=fp64", "precision.compute was 'fp32' and is 'fp64'"),  # C3
        ("--schedule.kind=linear", "schedule.kind was 'cosine' and is 'linear'"),  # C4
        ("--optimizer.lr=0.001", "optimizer.lr was 0.003 and is 0.001"),  # C4
        ("--batch.global=8", "batch.global was 16 and is 8"),  # C4
    ],
)
def test_another_identity_is_refused_with_both_values(runs, override, said):
    stopped_at(runs, 6)
    with pytest.raises(MeshwrightError) as refused:
        runs.run("", override)
    assert refused.value.exit_code == 3
    assert said in str(refused.value)
    assert [entry.step for entry in runs.published()] == [6, 3]


def test_a_manifest_of_another_run_is_refused_even_where_the_folder_does_not_tell(runs):
    # C1, C4: somebody has put another run's identity file there
    stopped_at(runs, 6)
    path = runs.folder / "identity.json"
    known = json.loads(path.read_text())
    known["identity"]["seed"] = 7
    known["identity_fingerprint"] = fingerprint(known["identity"])
    path.write_text(json.dumps(known))
    with pytest.raises(MeshwrightError, match="seed was 0 and is 7") as refused:
        runs.run("", "--seed=7")
    assert refused.value.exit_code == 3


def test_a_fork_goes_on_as_a_new_timeline_and_its_restarts_stay_on_it(runs):
    # C1, C4
    stopped_at(runs, 6)
    runs.run("step.forward:rank1:kill@step10", "--optimizer.lr=0.001", fork=True)
    restored = [(event["step"], event["checkpoint"]) for event in runs.events("restored")]
    assert restored == [(6, "step-00000006.a0001"), (9, "step-00000009.a0002")]
    known = json.loads((runs.folder / "identity.json").read_text())
    assert (known["timeline"], known["until"]) == (2, {"1": 6})
    newest = runs.published()[0].manifest
    assert (newest.timeline, newest.step) == (2, STEPS)
    assert newest.identity["optimizer.lr"] == 0.001


def test_a_fork_that_is_killed_before_it_began_is_still_made_and_made_once(runs):
    stopped_at(runs, 6)
    runs.run("start.begin:rank0:kill#0,start.restored:rank1:kill#1", "--optimizer.lr=0.001", fork=True)
    assert json.loads((runs.folder / "identity.json").read_text())["timeline"] == 2
    assert runs.published()[0].manifest.timeline == 2


def test_a_fork_does_not_see_what_its_parent_did_after_it(runs):
    runs.run("", "--checkpoint.keep=10")
    for step in (9, 12):
        shutil.rmtree(runs.folder / "checkpoints" / f"step-{step:08d}.a0001")
    with pytest.raises(MeshwrightError, match="before step 8"):
        runs.run("step.fetch:rank0:term@step8", "--optimizer.lr=0.001", "--checkpoint.keep=10", fork=True)
    assert json.loads((runs.folder / "identity.json").read_text())["until"] == {"1": 6}


def test_a_fork_into_another_shape_is_refused_before_any_tensor_is_touched(runs):
    # C3
    stopped_at(runs, 6)
    with pytest.raises(MeshwrightError, match="is of another model") as refused:
        runs.run("", "--model.width=64", fork=True)
    assert refused.value.exit_code == 3


def test_another_torch_or_code_is_allowed_and_said(runs, monkeypatch):
    # C5
    stopped_at(runs, 6)
    monkeypatch.setattr("meshwright.trainer.resume.code_fingerprint", lambda: "another")
    runs.run()
    (restored,) = runs.events("restored")
    assert any(change.startswith("code was ") and change.endswith("is another") for change in restored["changes"])


def test_data_that_changed_under_the_run_is_refused_and_named(runs, tmp_path):
    # C2, N5
    file = tmp_path / "tokens.bin"
    tokens = np.arange(20_000, dtype=np.uint16) % 256
    tokens.tofile(file)
    data = ("--data.kind=tokens", f"--data.path={file}")
    stopped_at(runs, 6, *data)
    tokens[12_345] ^= 1
    tokens.tofile(file)
    with pytest.raises(MeshwrightError, match=r"source\[0\].fingerprint was") as refused:
        runs.run("", *data)
    assert refused.value.exit_code == 3
    file.unlink()
    with pytest.raises(Exception, match=r"tokens\.bin") as missing:
        runs.run("", *data)
    assert missing.value.exit_code in (2, 6)
    tokens[12_345] ^= 1
    tokens.tofile(file)
    runs.run("", *data)
    assert sorted(ledger(runs.folder)) == list(range(STEPS))


def test_a_damaged_checkpoint_is_named_and_an_older_one_used_and_said(runs):
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


def test_without_an_intact_checkpoint_nothing_starts_from_scratch(runs):
    stopped_at(runs, 6)
    for manifest in runs.folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(MeshwrightError, match=r"none of 2 checkpoint\(s\) is intact") as ended:
        runs.run()
    assert ended.value.exit_code == 4
    assert len(runs.events("step")) == 6


@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_a_disk_that_is_full_or_broken_costs_a_save_and_nothing_else(runs, action):
    # D1, D2
    runs.run(f"save.write:rank1:{action}@step6")
    (failed,) = runs.events("save_failed")
    assert failed["step"] == 6
    assert "rank 1: checkpoints/step-00000006.a0001 was not saved" in failed["message"]
    assert [incident.outcome for incident in runs.incidents] == ["complete"]
    assert [entry.step for entry in runs.published()] == [12, 9, 3]
    runs.assert_as_if_undisturbed()


def test_a_failed_save_stops_the_run_where_the_policy_says_so(runs):
    # D1
    with pytest.raises(MeshwrightError, match="was not saved: No space left on device") as stopped:
        runs.run("save.write:rank1:enospc@step6", "--checkpoint.on_failure=stop")
    assert stopped.value.exit_code == 4
    runs.run()
    runs.assert_as_if_undisturbed()


def test_a_run_whose_last_save_fails_is_not_done(runs):
    # D11: the folder is taken away under the run
    with pytest.raises(MeshwrightError, match=r"step-00000012.a0001 was not saved") as stopped:
        runs.run("save.before_manifest:rank0:eio@step12")
    assert stopped.value.exit_code == 4
    assert [entry.step for entry in runs.published()] == [9, 6, 3]
    runs.run()
    runs.assert_as_if_undisturbed()


def test_a_slow_disk_skips_saves_and_never_has_two_in_flight(runs):
    # D12
    runs.run("save.begin:slow=0.4", "--checkpoint.mode=async", "--checkpoint.every=1")
    saves = runs.events("checkpoint")
    assert sum(save["skipped"] for save in saves) > 0
    assert len(saves) + sum(save["skipped"] for save in saves) >= STEPS - 1
    assert losses(runs.folder) == losses(runs.golden(2))
    assert final_digest(runs.folder) == final_digest(runs.golden(2))


def test_a_checkpoint_that_was_saved_while_training_went_on_is_that_of_its_own_step(runs):
    runs.run("", "--checkpoint.mode=async", "--checkpoint.every=1", "--checkpoint.keep=100")
    sync, runs.folder = runs.folder, runs.folder.with_name("sync")
    runs.run("", "--checkpoint.every=1", "--checkpoint.keep=100")
    exact = {entry.step: state_digest(entry) for entry in runs.published()}
    for entry in list_published(open_run_store(RunFolder(sync))):
        assert state_digest(entry) == exact[entry.step]


def test_checkpoints_without_their_identity_are_not_silently_left_behind(runs):
    stopped_at(runs, 6)
    (runs.folder / "identity.json").unlink()
    with pytest.raises(MeshwrightError, match=r"none of 2 checkpoint\(s\) belongs to this run") as ended:
        runs.run()
    assert ended.value.exit_code == 4


def test_a_read_error_while_the_run_is_taken_over_costs_no_checkpoint(runs, monkeypatch):
    stopped_at(runs, 6)
    from meshwright.recover.lease import acquire_lease
    from meshwright.store.posix import PosixCalls

    real = PosixCalls.read

    def broken(self, path, start, length):
        if path.endswith("manifest.json"):
            raise OSError(5, "Input/output error")
        return real(self, path, start, length)

    with monkeypatch.context() as patch:
        patch.setattr(PosixCalls, "read", broken)
        acquire_lease(RunFolder(runs.folder))
    assert [entry.step for entry in runs.published()] == [6, 3]


def test_a_record_older_than_a_setting_is_of_a_run_with_its_default():
    now = identity(RunConfig())
    before = {key: value for key, value in now.items() if not key.startswith("model.experts")}
    assert describe_differences(before, now) == ""
    assert "model.experts_shared was 0 and is 2" in describe_differences(before, now | {"model.experts_shared": 2})
