"""Power is lost, or the process killed, at every disk call of a save: the old checkpoint or the new one, never half."""

from __future__ import annotations

from functools import partial

import pytest
from simulated_disk import PowerLoss, SimulatedDisk, Trouble, store_on
from small_checkpoints import LINEAGE, digest_at, intact_steps, newest, save, save_on_two_ranks

from meshwright import faults
from meshwright.checkpoint.listing import list_checkpoint_folders, list_leases, list_published
from meshwright.checkpoint.retention import RetentionPolicy
from meshwright.checkpoint.unsharded import state_digest
from meshwright.recover import lease
from meshwright.store.posix import PosixStore
from meshwright.telemetry.run_folder import RunFolder

OUTCOMES = range(6)
"""Seeds of a power loss; 0 loses all that was not synced, 1 nothing."""
RANKS = {"1 rank": save} | {f"2 ranks, order {seed}": partial(save_on_two_ranks, seed=seed) for seed in range(3)}


def calls_of(disk: SimulatedDisk, work) -> tuple[list[str], int]:
    """Every disk call of some work, and how many of them `publish_if_absent` had made when it had returned."""
    trial = disk.with_trouble()
    store = store_on(trial)
    publish, returned = store.publish_if_absent, []

    def noted(*args) -> bool:
        done = publish(*args)
        returned.append(len(trial.done))
        return done

    store.publish_if_absent = noted
    work(store)
    return trial.done, max(returned, default=0)


def killed(disk: SimulatedDisk, at: int, work) -> SimulatedDisk:
    """The disk, un-synced things still un-synced, after a process was killed at call `at` of its work."""
    trial = disk.with_trouble(Trouble(at, "kill"))
    with pytest.raises(BaseException) as ended:  # noqa: PT011
        work(store_on(trial))
    assert trial.dead, ended.value
    return trial


# K4, K5, K6, K7, D7
@pytest.mark.parametrize("how", RANKS)
def test_a_crash_at_any_disk_call_leaves_the_old_checkpoint_or_the_new_one_whole(disk, how):
    saving = partial(RANKS[how], 2)
    calls, returned = calls_of(disk, saving)
    linked = calls.index("link manifest.json")
    assert linked < returned < len(calls)
    seen = set()
    for at in range(len(calls) + 1):
        left = killed(disk, at, saving) if at < len(calls) else finished(disk, saving)
        for seed in OUTCOMES:
            why = f"{how}, killed at call {at} ({[*calls, 'end'][at]}), power loss {seed}"
            steps = intact_steps(store_on(left.crash(seed)), why)
            assert steps & {1, 2}, why
            assert 2 not in steps or at > linked, why
            assert 2 in steps or at < returned, why
            seen.add(frozenset(steps))
    assert seen == {frozenset({1}), frozenset({1, 2}), frozenset({2})}


def finished(disk: SimulatedDisk, work) -> SimulatedDisk:
    trial = disk.with_trouble()
    work(store_on(trial))
    return trial


# K4, K7, D7
def test_a_crash_at_any_disk_call_of_a_first_save_leaves_none_or_a_whole_one():
    disk = SimulatedDisk()
    calls, returned = calls_of(disk, partial(save, 1))
    for at in range(len(calls)):
        left = killed(disk, at, partial(save, 1))
        for seed in OUTCOMES:
            why = f"killed at call {at} ({calls[at]}), power loss {seed}"
            steps = intact_steps(store_on(left.crash(seed)), why)
            assert steps == {1} or (steps == set() and at < returned), why


# K4, K5, K6: what the crash left is never listed, and goes with the next save's retention.
def test_what_a_crashed_save_left_behind_is_collected_by_the_next_attempt(disk):
    calls, _ = calls_of(disk, partial(save, 2))
    orphans = 0
    for at in range(len(calls)):
        left = killed(disk, at, partial(save, 2))
        for seed in (0, 1, 2 + at):
            store = store_on(left.crash(seed))
            orphans += sum(not entry.published for entry in list_checkpoint_folders(store))
            save(3, store, attempt=2)
            assert [entry.step for entry in list_checkpoint_folders(store)] == [3], (at, calls[at], seed)
    assert orphans


# K7, D7: nobody has synced what the killed process left un-synced, and the next one must not build on it.
def test_a_save_after_a_killed_one_is_durable_whatever_that_one_had_not_synced():
    disk = SimulatedDisk()
    calls, _ = calls_of(disk, partial(save, 1))
    for at in range(len(calls)):
        left = killed(disk, at, partial(save, 1)).with_trouble()
        save(2, store_on(left), attempt=2)
        for seed in OUTCOMES:
            why = f"killed at call {at} ({calls[at]}), relaunched, saved, power loss {seed}"
            assert 2 in intact_steps(store_on(left.crash(seed)), why), why


# K3
def test_a_process_that_dies_in_the_staging_copy_has_touched_nothing(disk, monkeypatch):
    monkeypatch.setattr(faults, "ARMED_FAULTS", faults.parse_faults("save.stage:raise@step2"))
    trial = disk.with_trouble()
    with pytest.raises(faults.InjectedFault):
        save(2, store_on(trial))
    assert trial.done == []


# K5, K6: by the named fail points too, as a process of a real run reaches them.
@pytest.mark.parametrize("point", ["save.begin", "save.write", "save.after_shard", "save.before_manifest"])
def test_a_fail_point_before_publication_leaves_the_old_checkpoint(disk, monkeypatch, point):
    monkeypatch.setattr(faults, "ARMED_FAULTS", faults.parse_faults(f"{point}:raise@step2"))
    with pytest.raises(BaseException, match=r".") as failure:
        save(2, store_on(disk))
    assert not isinstance(failure.value, PowerLoss)
    assert intact_steps(store_on(disk)) == {1}


# K9
def test_a_crash_at_any_disk_call_of_retention_keeps_enough_and_lists_none_that_is_half_deleted():
    disk = SimulatedDisk()
    for step in range(1, 7):
        parent = newest(store_on(disk)) if step > 1 else None
        save(step, store_on(disk), keep=9, parent=parent)
    disk = disk.crash(1)
    keep, every = 2, 3  # ordinals 0 and 3 stay for good: steps 1 and 4
    pruning = lambda store: RetentionPolicy(store, 1, keep, every, LINEAGE).apply()  # noqa: E731
    calls, _ = calls_of(disk, pruning)
    assert calls.count("remove manifest.json") == 2
    for at in range(len(calls)):
        left = killed(disk, at, pruning)
        for seed in OUTCOMES:
            store = store_on(left.crash(seed))
            why = f"killed at call {at} ({calls[at]}), power loss {seed}"
            assert intact_steps(store, why) >= {1, 4, 5, 6}, why
        pruning(store)
        assert intact_steps(store, why) == {1, 4, 5, 6}, why


@pytest.fixture
def taking(tmp_path, monkeypatch):
    """Takes the run on a store, and gives the attempt's number."""
    place = {}
    monkeypatch.setattr(lease, "open_run_store", lambda _: place["store"])

    def take(store: PosixStore) -> int:
        place["store"] = store
        return lease.acquire_lease(RunFolder(tmp_path)).attempt

    return take


# L2, D7
def test_a_crash_at_any_disk_call_of_taking_a_run_leaves_no_lease_or_a_whole_one(taking):
    disk = SimulatedDisk()
    assert taking(store_on(disk)) == 1
    disk = disk.crash(0)
    calls, returned = calls_of(disk, taking)
    for at in range(len(calls)):
        left = killed(disk, at, taking)
        for seed in OUTCOMES:
            why = f"killed at call {at} ({calls[at]}), power loss {seed}"
            store = store_on(left.crash(seed))
            held = [attempt for attempt, _ in list_leases(store)]
            assert held == [2, 1] or (held == [1] and at < returned), why
            assert taking(store) > max(held), why


# L2, D7: a taker that was killed has left its folder un-synced.
def test_a_lease_taken_after_a_killed_taker_is_durable(taking):
    calls, _ = calls_of(SimulatedDisk(), taking)
    for at in range(len(calls)):
        left = killed(SimulatedDisk(), at, taking).with_trouble()
        attempt = taking(store_on(left))
        for seed in OUTCOMES:
            why = f"killed at call {at} ({calls[at]}), taken again, power loss {seed}"
            assert attempt in [number for number, _ in list_leases(store_on(left.crash(seed)))], why


# O3: two that race for one name.
def test_a_published_file_is_never_replaced_and_the_second_publisher_is_told(disk):
    store = store_on(disk)
    old = newest(store)
    assert not store.publish_if_absent(f"{old.folder}/manifest.json", b"{}")
    assert state_digest(newest(store)) == digest_at(1)
    assert store.list_names(old.folder) == ["manifest.json", "rank-00000.shard"]
    assert [entry.step for entry in list_published(store)] == [1]


@pytest.mark.long
def test_a_crash_at_any_disk_call_under_many_orders_and_power_losses(disk):
    """K4, K7, D7 again, with more of both."""
    for order in range(12):
        saving = partial(save_on_two_ranks, 2, seed=order)
        calls, returned = calls_of(disk, saving)
        for at in range(len(calls)):
            left = killed(disk, at, saving)
            for seed in range(40):
                why = f"order {order}, killed at call {at} ({calls[at]}), power loss {seed}"
                steps = intact_steps(store_on(left.crash(seed)), why)
                assert 2 in steps or (steps == {1} and at < returned), why
