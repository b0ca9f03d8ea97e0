"""Tests of meshwright.core.checkpoint.retention: the newest checkpoints that verify and every Nth are kept."""

from __future__ import annotations

import os

import pytest

from meshwright.base.checkpoint.listing import RunLineage, list_checkpoint_folders, list_published
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.posix import PosixStore
from meshwright.core import faults
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.state import parameters_digest
from meshwright.core.parallel.world import World
from meshwright.core.recover.lease import acquire_lease
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, digest_at, intact_steps, newest, save, state_at


@pytest.fixture
def store(tmp_path):
    return PosixStore(tmp_path)


def save_all(store: PosixStore, steps, **options) -> None:
    """Save a lineage: each checkpoint is the child of the previous one."""
    for step in steps:
        listed = list_published(store)
        save(step, store, parent=listed[0] if listed else None, **options)


def prune(store: PosixStore, keep: int, every: int = 0, attempt: int = 1, lineage: RunLineage = LINEAGE) -> list[str]:
    return RetentionPolicy(store, attempt, keep, every, lineage).apply()


def damage(store: PosixStore, step: int, attempt: int = 1) -> None:
    os.truncate(store.path(f"checkpoints/step-{step:08d}.a{attempt:04d}/rank-00000.shard"), 4100)


def folder_names(store: PosixStore) -> list[str]:
    return [entry.name for entry in reversed(list_checkpoint_folders(store))]


def test_retention_keeps_the_newest_and_every_nth_checkpoint(store):
    save_all(store, range(10, 110, 10), keep=2, every=4)  # ordinals 0 to 9
    assert intact_steps(store) == {10, 50, 90, 100}
    assert folder_names(store) == [f"step-{step:08d}.a0001" for step in (10, 50, 90, 100)]


def test_keep_every_counts_checkpoints_not_steps(store):
    save_all(store, (7, 8, 30, 31, 32), keep=1, every=2)
    assert intact_steps(store) == {7, 30, 32}


def test_damaged_checkpoints_do_not_count_as_kept(store):
    save_all(store, range(1, 6), keep=9)
    damage(store, 5)
    damage(store, 3)
    assert prune(store, keep=2) == ["step-00000001.a0001"]  # 4 and 2 verify
    assert [entry.step for entry in list_published(store)] == [5, 4, 3, 2]


def test_nothing_is_deleted_unless_enough_checkpoints_verify(store):
    save_all(store, range(1, 5), keep=9)
    for step in (2, 3, 4):
        damage(store, step)
    assert prune(store, keep=2) == []
    assert prune(store, keep=1) == []
    assert [entry.step for entry in list_published(store)] == [4, 3, 2, 1]


def test_damaged_checkpoints_older_than_the_kept_ones_are_deleted(store):
    save_all(store, range(1, 5), keep=9)
    damage(store, 1)
    os.truncate(store.path("checkpoints/step-00000002.a0001/manifest.json"), 9)
    assert sorted(prune(store, keep=2)) == ["step-00000001.a0001", "step-00000002.a0001"]
    assert folder_names(store) == ["step-00000003.a0001", "step-00000004.a0001"]


def orphan(store: PosixStore, step: int, attempt: int) -> str:
    """The files of a save that was killed before it published."""
    sink = store.create(f"checkpoints/step-{step:08d}.a{attempt:04d}/rank-00000.shard")
    sink.write(b"half")
    sink.close()
    return f"step-{step:08d}.a{attempt:04d}"


def test_unpublished_files_of_earlier_attempts_are_deleted(store):
    """Those of the current attempt may belong to a save in flight."""
    save_all(store, (1, 2), keep=9)
    earlier, current = orphan(store, 3, attempt=1), orphan(store, 4, attempt=2)
    assert prune(store, keep=9, attempt=1) == []
    assert prune(store, keep=9, attempt=2) == [earlier]
    assert current in folder_names(store)
    assert intact_steps(store) == {1, 2}


def test_retention_ignores_other_timelines_and_other_runs(store):
    save_all(store, (1, 2, 3), keep=9)
    save(9, store, keep=9, lineage=RunLineage("ffff0000", 1, {}))
    fork = RunLineage(LINEAGE.run, 2, {1: 2})  # forked from timeline 1 after step 2
    for step in (3, 4):
        save(step, store, attempt=2, lineage=fork, keep=9)
    assert [entry.name for entry in list_published(store, fork)] == [
        "step-00000004.a0002",
        "step-00000003.a0002",
        "step-00000002.a0001",
        "step-00000001.a0001",
    ]
    assert len(prune(store, keep=1, attempt=2, lineage=fork)) == 3
    assert folder_names(store) == ["step-00000003.a0001", "step-00000004.a0002", "step-00000009.a0001"]


def test_checkpoint_published_after_a_takeover_is_fenced_and_deleted(store, tmp_path, monkeypatch):
    """The first attempt is suspended just before it publishes, and a second attempt takes over the run."""
    folder, leases = RunFolder(tmp_path), []
    assert acquire_lease(folder).attempt == 1
    save(1, store, attempt=1, keep=9)
    with monkeypatch.context() as suspended:
        take_over = lambda point, _: leases.append(acquire_lease(folder)) if point == "save.before_publish" else ""  # noqa: E731
        suspended.setattr(faults, "fail_point", take_over)
        save(2, store, attempt=1, keep=9)
    assert [lease.attempt for lease in leases] == [2]
    (fenced,) = [entry for entry in list_checkpoint_folders(store) if entry.fenced]
    assert fenced.name == "step-00000002.a0001"
    assert "attempt 1 after attempt 2" in fenced.problem
    assert intact_steps(store) == {1}
    state = state_at(0)
    found = restore(store, World(), LINEAGE, state, lambda _: None, fallback=False, on_damaged=lambda *_: None)
    assert found.manifest.step == 1
    assert parameters_digest(state.items()) == digest_at(1)
    saved = save(3, store, attempt=2, keep=2, parent=newest(store))
    assert saved.deleted == ["step-00000002.a0001"]
    assert folder_names(store) == ["step-00000001.a0001", "step-00000003.a0002"]


def test_fenced_attempt_deletes_nothing_of_the_newer_attempt(store, tmp_path):
    folder = RunFolder(tmp_path)
    acquire_lease(folder)
    save_all(store, (1, 2), attempt=1, keep=9)
    acquire_lease(folder)
    save(3, store, attempt=2, keep=9, parent=newest(store))
    assert orphan(store, 4, attempt=2) not in prune(store, keep=1, attempt=1)
    assert 3 in intact_steps(store)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b'{"digest":"0"}'])
def test_damaged_lease_loses_no_checkpoint(store, tmp_path, content):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        assert acquire_lease(folder).attempt == step
        save(step, store, attempt=step, keep=9)
    (folder.attempt(2) / "lease.json").write_bytes(content)
    assert intact_steps(store) == {1, 2}
    assert acquire_lease(folder).attempt == 3
    save(3, store, attempt=3, keep=9)
    assert intact_steps(store) == {1, 2, 3}
