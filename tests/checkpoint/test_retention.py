"""What stays and what goes: the newest few that verify, every so-manieth, and nobody else's."""

from __future__ import annotations

import os

import pytest
from small_checkpoints import LINEAGE, digest_at, intact_steps, newest, save, state_of

from meshwright import faults
from meshwright.checkpoint.listing import RunLineage, list_checkpoint_folders, list_published
from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.retention import RetentionPolicy
from meshwright.checkpoint.state import parameters_digest
from meshwright.parallel.world import World
from meshwright.recover.lease import acquire_lease
from meshwright.store.posix import PosixStore
from meshwright.telemetry.run_folder import RunFolder


@pytest.fixture
def store(tmp_path):
    return PosixStore(tmp_path)


def save_all(store: PosixStore, steps, **how) -> None:
    """A lineage: each the child of the one before."""
    for step in steps:
        listed = list_published(store)
        save(step, store, parent=listed[0] if listed else None, **how)


def prune(store: PosixStore, keep: int, every: int = 0, attempt: int = 1, lineage: RunLineage = LINEAGE) -> list[str]:
    return RetentionPolicy(store, attempt, keep, every, lineage).apply()


def damage(store: PosixStore, step: int, attempt: int = 1) -> None:
    os.truncate(store.path(f"checkpoints/step-{step:08d}.a{attempt:04d}/rank-00000.shard"), 4100)


def names(store: PosixStore) -> list[str]:
    return [entry.name for entry in reversed(list_checkpoint_folders(store))]


def test_the_newest_and_every_kth_stay(store):
    save_all(store, range(10, 110, 10), keep=2, every=4)  # ordinals 0 to 9
    assert intact_steps(store) == {10, 50, 90, 100}
    assert names(store) == [f"step-{step:08d}.a0001" for step in (10, 50, 90, 100)]


def test_every_kth_counts_checkpoints_not_steps(store):
    save_all(store, (7, 8, 30, 31, 32), keep=1, every=2)
    assert intact_steps(store) == {7, 30, 32}


def test_damaged_ones_do_not_count_as_kept(store):
    """K9"""
    save_all(store, range(1, 6), keep=9)
    damage(store, 5)
    damage(store, 3)
    assert prune(store, keep=2) == ["step-00000001.a0001"]  # 4 and 2 verify
    assert [entry.step for entry in list_published(store)] == [5, 4, 3, 2]


def test_nothing_is_deleted_before_enough_verify(store):
    """K9, D1"""
    save_all(store, range(1, 5), keep=9)
    for step in (2, 3, 4):
        damage(store, step)
    assert prune(store, keep=2) == []
    assert prune(store, keep=1) == []
    assert [entry.step for entry in list_published(store)] == [4, 3, 2, 1]


def test_damaged_ones_older_than_those_that_are_kept_go(store):
    save_all(store, range(1, 5), keep=9)
    damage(store, 1)
    os.truncate(store.path("checkpoints/step-00000002.a0001/manifest.json"), 9)
    assert sorted(prune(store, keep=2)) == ["step-00000001.a0001", "step-00000002.a0001"]
    assert names(store) == ["step-00000003.a0001", "step-00000004.a0001"]


def orphan(store: PosixStore, step: int, attempt: int) -> str:
    """What a save leaves that was killed before it could publish."""
    sink = store.create(f"checkpoints/step-{step:08d}.a{attempt:04d}/rank-00000.shard")
    sink.write(b"half")
    sink.close()
    return f"step-{step:08d}.a{attempt:04d}"


def test_what_earlier_attempts_never_published_goes_and_the_current_attempts_stays(store):
    """K4, K5: one of the current attempt may be a save in flight."""
    save_all(store, (1, 2), keep=9)
    old, own = orphan(store, 3, attempt=1), orphan(store, 4, attempt=2)
    assert prune(store, keep=9, attempt=1) == []
    assert prune(store, keep=9, attempt=2) == [old]
    assert own in names(store)
    assert intact_steps(store) == {1, 2}


def test_other_timelines_and_other_runs_are_left_alone(store):
    """C1"""
    save_all(store, (1, 2, 3), keep=9)
    save(9, store, keep=9, lineage=RunLineage("ffff0000", 1, {}))
    fork = RunLineage(LINEAGE.run, 2, {1: 2})  # left timeline 1 after step 2
    for step in (3, 4):
        save(step, store, attempt=2, lineage=fork, keep=9)
    assert [entry.name for entry in list_published(store, fork)] == [
        "step-00000004.a0002",
        "step-00000003.a0002",
        "step-00000002.a0001",
        "step-00000001.a0001",
    ]
    assert len(prune(store, keep=1, attempt=2, lineage=fork)) == 3
    assert names(store) == ["step-00000003.a0001", "step-00000004.a0002", "step-00000009.a0001"]


def test_what_an_old_holder_publishes_after_a_take_over_is_never_listed_and_goes(store, tmp_path, monkeypatch):
    """L2: it sleeps just before it publishes, and the run is taken over meanwhile."""
    folder, taken = RunFolder(tmp_path), []
    assert acquire_lease(folder).attempt == 1
    save(1, store, attempt=1, keep=9)
    with monkeypatch.context() as asleep:
        over = lambda point, _step: taken.append(acquire_lease(folder)) if point == "save.before_publish" else ""  # noqa: E731
        asleep.setattr(faults, "fail_point", over)
        save(2, store, attempt=1, keep=9)
    assert [lease.attempt for lease in taken] == [2]
    (late,) = [entry for entry in list_checkpoint_folders(store) if entry.fenced]
    assert late.name == "step-00000002.a0001"
    assert "attempt 1 after attempt 2" in late.problem
    assert intact_steps(store) == {1}
    state = state_of(0)
    found = restore(store, World(), LINEAGE, state, lambda _: None, fallback=False, on_damaged=lambda *_: None)
    assert found.manifest.step == 1
    assert parameters_digest(state.items()) == digest_at(1)
    saved = save(3, store, attempt=2, keep=2, parent=newest(store))
    assert saved.deleted == ["step-00000002.a0001"]
    assert names(store) == ["step-00000001.a0001", "step-00000003.a0002"]


def test_an_old_holder_deletes_nothing_of_the_new_one(store, tmp_path):
    """L2"""
    folder = RunFolder(tmp_path)
    acquire_lease(folder)
    save_all(store, (1, 2), attempt=1, keep=9)
    acquire_lease(folder)
    save(3, store, attempt=2, keep=9, parent=newest(store))
    assert orphan(store, 4, attempt=2) not in prune(store, keep=1, attempt=1)
    assert 3 in intact_steps(store)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b'{"digest":"0"}'])
def test_a_damaged_lease_costs_a_number_and_no_checkpoint(store, tmp_path, content):
    """L2, D3"""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        assert acquire_lease(folder).attempt == step
        save(step, store, attempt=step, keep=9)
    (folder.attempt(2) / "lease.json").write_bytes(content)
    assert intact_steps(store) == {1, 2}
    assert acquire_lease(folder).attempt == 3
    save(3, store, attempt=3, keep=9)
    assert intact_steps(store) == {1, 2, 3}
