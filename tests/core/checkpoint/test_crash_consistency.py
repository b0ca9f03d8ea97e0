"""Crash consistency: a kill or power loss at every system call leaves the old checkpoint or the new one, complete."""

from __future__ import annotations

from functools import partial

import pytest

from meshwright.base.checkpoint.listing import list_checkpoint_folders, list_leases, list_published
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.posix import PosixStore
from meshwright.core import faults
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.recover import lease
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, digest_at, intact_steps, newest, save, save_on_two_ranks
from tests.core.checkpoint.simulated_disk import DiskFault, PowerLoss, SimulatedDisk, open_store

POWER_LOSSES = range(6)
"""Seeds of a power loss: 0 loses all unsynced data, 1 loses none."""
RANKS = {"1 rank": save} | {f"2 ranks, order {seed}": partial(save_on_two_ranks, seed=seed) for seed in range(3)}


def record_calls(disk: SimulatedDisk, task) -> tuple[list[str], int]:
    """Every disk call of a task, and the number of calls at the return of `publish_if_absent`."""
    trial = disk.with_fault()
    store = open_store(trial)
    publish, returned = store.publish_if_absent, []

    def counting_publish(*args) -> bool:
        published = publish(*args)
        returned.append(len(trial.calls))
        return published

    store.publish_if_absent = counting_publish
    task(store)
    return trial.calls, max(returned, default=0)


def kill_at(disk: SimulatedDisk, call: int, task) -> SimulatedDisk:
    """The disk, with its unsynced data, after the process was killed at a call of its task."""
    trial = disk.with_fault(DiskFault(call, "kill"))
    with pytest.raises(BaseException) as ended:  # noqa: PT011
        task(open_store(trial))
    assert trial.killed, ended.value
    return trial


@pytest.mark.parametrize("how", RANKS)
def test_crash_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint_intact(disk, how):
    saving = partial(RANKS[how], 2)
    calls, returned = record_calls(disk, saving)
    linked = calls.index("link manifest.json")
    assert linked < returned < len(calls)
    seen = set()
    for at in range(len(calls) + 1):
        left = kill_at(disk, at, saving) if at < len(calls) else complete(disk, saving)
        for seed in POWER_LOSSES:
            context = f"{how}, killed at call {at} ({[*calls, 'end'][at]}), power loss {seed}"
            steps = intact_steps(open_store(left.crash(seed)), context)
            assert steps & {1, 2}, context
            assert 2 not in steps or at > linked, context
            assert 2 in steps or at < returned, context
            seen.add(frozenset(steps))
    assert seen == {frozenset({1}), frozenset({1, 2}), frozenset({2})}


def complete(disk: SimulatedDisk, task) -> SimulatedDisk:
    trial = disk.with_fault()
    task(open_store(trial))
    return trial


def test_crash_at_any_call_of_the_first_save_leaves_none_or_an_intact_checkpoint():
    disk = SimulatedDisk()
    calls, returned = record_calls(disk, partial(save, 1))
    for at in range(len(calls)):
        left = kill_at(disk, at, partial(save, 1))
        for seed in POWER_LOSSES:
            context = f"killed at call {at} ({calls[at]}), power loss {seed}"
            steps = intact_steps(open_store(left.crash(seed)), context)
            assert steps == {1} or (steps == set() and at < returned), context


# Files of a crashed save are never listed; the retention of the next save deletes them.
def test_retention_deletes_the_files_of_a_crashed_save(disk):
    calls, _ = record_calls(disk, partial(save, 2))
    orphans = 0
    for at in range(len(calls)):
        left = kill_at(disk, at, partial(save, 2))
        for seed in (0, 1, 2 + at):
            store = open_store(left.crash(seed))
            orphans += sum(not entry.published for entry in list_checkpoint_folders(store))
            save(3, store, attempt=2)
            assert [entry.step for entry in list_checkpoint_folders(store)] == [3], (at, calls[at], seed)
    assert orphans


# Nothing has synced what the killed process left unsynced: the next process must not rely on it.
def test_save_after_a_killed_save_is_durable():
    disk = SimulatedDisk()
    calls, _ = record_calls(disk, partial(save, 1))
    for at in range(len(calls)):
        left = kill_at(disk, at, partial(save, 1)).with_fault()
        save(2, open_store(left), attempt=2)
        for seed in POWER_LOSSES:
            context = f"killed at call {at} ({calls[at]}), relaunched, saved, power loss {seed}"
            assert 2 in intact_steps(open_store(left.crash(seed)), context), context


def test_kill_during_staging_makes_no_disk_call(disk, monkeypatch):
    monkeypatch.setattr(faults, "ARMED_FAULTS", faults.parse_faults("save.stage:raise@step2"))
    trial = disk.with_fault()
    with pytest.raises(faults.InjectedFault):
        save(2, open_store(trial))
    assert trial.calls == []


@pytest.mark.parametrize(
    "point", ["save.begin", "save.write", "save.after_shard", "save.after_part", "save.before_manifest"]
)
def test_fault_before_publication_leaves_the_old_checkpoint(disk, monkeypatch, point):
    monkeypatch.setattr(faults, "ARMED_FAULTS", faults.parse_faults(f"{point}:raise@step2"))
    with pytest.raises(BaseException, match=r".") as failure:
        save(2, open_store(disk))
    assert not isinstance(failure.value, PowerLoss)
    assert intact_steps(open_store(disk)) == {1}


def test_crash_at_any_call_of_retention_keeps_enough_checkpoints_and_lists_no_partial_one():
    disk = SimulatedDisk()
    for step in range(1, 7):
        parent = newest(open_store(disk)) if step > 1 else None
        save(step, open_store(disk), keep=9, parent=parent)
    disk = disk.crash(1)
    keep, every = 2, 3  # ordinals 0 and 3 are permanent: steps 1 and 4
    pruning = lambda store: RetentionPolicy(store, 1, keep, every, LINEAGE).apply()  # noqa: E731
    calls, _ = record_calls(disk, pruning)
    assert calls.count("remove manifest.json") == 2
    for at in range(len(calls)):
        left = kill_at(disk, at, pruning)
        for seed in POWER_LOSSES:
            store = open_store(left.crash(seed))
            context = f"killed at call {at} ({calls[at]}), power loss {seed}"
            assert intact_steps(store, context) >= {1, 4, 5, 6}, context
        pruning(store)
        assert intact_steps(store, context) == {1, 4, 5, 6}, context


@pytest.fixture
def acquire(tmp_path, monkeypatch):
    """A function that acquires the lease of the run on a store and returns the number of the attempt."""
    current = {}
    monkeypatch.setattr(lease, "open_run_store", lambda _: current["store"])

    def acquire_on(store: PosixStore) -> int:
        current["store"] = store
        return lease.acquire_lease(RunFolder(tmp_path)).attempt

    return acquire_on


def test_crash_at_any_call_of_acquiring_a_lease_leaves_none_or_a_valid_one(acquire):
    disk = SimulatedDisk()
    assert acquire(open_store(disk)) == 1
    disk = disk.crash(0)
    calls, returned = record_calls(disk, acquire)
    for at in range(len(calls)):
        left = kill_at(disk, at, acquire)
        for seed in POWER_LOSSES:
            context = f"killed at call {at} ({calls[at]}), power loss {seed}"
            store = open_store(left.crash(seed))
            acquired = [attempt for attempt, _ in list_leases(store)]
            assert acquired == [2, 1] or (acquired == [1] and at < returned), context
            assert acquire(store) > max(acquired), context


# The killed process has left the folder of its attempt unsynced.
def test_lease_acquired_after_a_killed_process_is_durable(acquire):
    calls, _ = record_calls(SimulatedDisk(), acquire)
    for at in range(len(calls)):
        left = kill_at(SimulatedDisk(), at, acquire).with_fault()
        attempt = acquire(open_store(left))
        for seed in POWER_LOSSES:
            context = f"killed at call {at} ({calls[at]}), acquired again, power loss {seed}"
            assert attempt in [number for number, _ in list_leases(open_store(left.crash(seed)))], context


# Two processes race for one name.
def test_publish_if_absent_never_replaces_a_file_and_returns_false(disk):
    store = open_store(disk)
    old = newest(store)
    assert not store.publish_if_absent(f"{old.folder}/manifest.json", b"{}")
    assert state_digest(newest(store)) == digest_at(1)
    assert store.list_names(old.folder) == ["manifest.json", "rank-00000.part.json", "rank-00000.shard"]
    assert [entry.step for entry in list_published(store)] == [1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_crash_at_any_call_of_a_save_with_many_interleavings_and_power_losses(disk):
    for order in range(12):
        saving = partial(save_on_two_ranks, 2, seed=order)
        calls, returned = record_calls(disk, saving)
        for at in range(len(calls)):
            left = kill_at(disk, at, saving)
            for seed in range(40):
                context = f"order {order}, killed at call {at} ({calls[at]}), power loss {seed}"
                steps = intact_steps(open_store(left.crash(seed)), context)
                assert 2 in steps or (steps == {1} and at < returned), context
