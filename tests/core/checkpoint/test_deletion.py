"""A checkpoint that retention deletes while it is read is not damaged: verify, digest, list and restore skip it."""

from __future__ import annotations

import shutil

import pytest

from meshwright.base.store.posix import PosixCalls, PosixStore
from meshwright.core.checkpoint import inspect
from meshwright.core.checkpoint import restore as restore_module
from meshwright.core.checkpoint.inspect import digest, list_rows, verify_rows
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.parallel.world import World
from meshwright.errors import CheckpointError
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, save, state_at


@pytest.fixture
def run(tmp_path):
    """A run folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(step, PosixStore(tmp_path), keep=9)
    return tmp_path


def deleting(run, step):
    """`find_damage` beside a job that deletes the checkpoint of a step: the manifest first, then the other files."""

    def find(entry, *args, **options):
        if entry.step == step:
            shutil.rmtree(run / entry.folder)
        return find_damage(entry, *args, **options)

    return find


def test_verify_does_not_report_a_deleted_checkpoint_as_damaged(run, monkeypatch):
    monkeypatch.setattr(inspect, "find_damage", deleting(run, 1))
    assert [(row["step"], row["damage"]) for row in verify_rows(run, None)] == [(2, [])]


def test_verify_of_a_deleted_step_finds_no_checkpoint(run, monkeypatch):
    monkeypatch.setattr(inspect, "find_damage", deleting(run, 1))
    with pytest.raises(CheckpointError, match="has no checkpoint of step 1"):
        verify_rows(run, 1)


def test_verify_reports_a_missing_file_of_a_checkpoint_that_exists(run):
    (run / "checkpoints" / "step-00000002.a0001" / "rank-00000.shard").unlink()
    assert [(row["step"], len(row["damage"])) for row in verify_rows(run, None)] == [(2, 1), (1, 0)]


def test_digest_of_the_newest_checkpoint_skips_a_deleted_one(run, monkeypatch):
    monkeypatch.setattr(inspect, "find_damage", deleting(run, 2))
    assert digest(run, None)["step"] == 1


def test_digest_of_a_checkpoint_that_is_deleted_after_its_verification_is_one_line(run, monkeypatch):
    def delete_and_read(entry):
        shutil.rmtree(run / entry.folder)
        return entry.store.read(f"{entry.folder}/rank-00000.shard", 0, 1)

    monkeypatch.setattr(inspect, "state_digest", delete_and_read)
    with pytest.raises(CheckpointError, match=r"step-00000002\.a0001 was deleted while it was read"):
        digest(run, None)


def test_list_does_not_report_a_manifest_that_vanishes_as_invalid(run, monkeypatch):
    read = PosixCalls.read

    def read_after_deletion(calls, path, start, length):
        if "step-00000001" in path:
            shutil.rmtree(run / "checkpoints" / "step-00000001.a0001")
        return read(calls, path, start, length)

    monkeypatch.setattr(PosixCalls, "read", read_after_deletion)
    assert [row["status"] for row in list_rows(run)] == ["published", "not published"]


def test_restore_skips_a_deleted_checkpoint_without_reporting_damage(run, monkeypatch):
    reported = []
    options = {"fallback": False, "on_damaged": lambda *damage: reported.append(damage)}
    monkeypatch.setattr(restore_module, "find_damage", deleting(run, 2))
    result = restore(PosixStore(run), World(), LINEAGE, state_at(0), lambda _: None, **options)
    assert (result.manifest.step, result.skipped, reported) == (1, [], [])


def test_restore_never_starts_from_zero_because_the_checkpoints_were_deleted(run, monkeypatch):
    shutil.rmtree(run / "checkpoints" / "step-00000001.a0001")
    monkeypatch.setattr(restore_module, "find_damage", deleting(run, 2))
    with pytest.raises(CheckpointError, match=r"step-00000002\.a0001 was deleted while it was restored"):
        restore(
            PosixStore(run), World(), LINEAGE, state_at(0), lambda _: None, fallback=True, on_damaged=lambda *_: None
        )
