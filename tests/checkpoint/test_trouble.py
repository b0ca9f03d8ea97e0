"""Disks that are full, broken, slow or gone: a save that fails says so, and harms no other checkpoint."""

from __future__ import annotations

import errno
import shutil
import threading
from dataclasses import replace
from functools import partial

import pytest
from simulated_disk import SimulatedDisk, Trouble, store_on
from small_checkpoints import LINEAGE, intact_steps, newest, notes_at, save, save_on_two_ranks, saver_at, state_of

from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.retention import RetentionPolicy
from meshwright.checkpoint.state import parameters_digest
from meshwright.errors import CheckpointError
from meshwright.parallel.world import World
from meshwright.store.posix import PosixCalls, PosixStore

READS = ("list_names", "size", "read")
TROUBLES = [("error", errno.ENOSPC), ("error", errno.EIO), ("late", errno.EIO), ("part", errno.ENOSPC)]
RANKS = {"1 rank": save, "2 ranks": partial(save_on_two_ranks, seed=1)}


def calls_of(disk: SimulatedDisk, work) -> list[str]:
    trial = disk.with_trouble()
    work(store_on(trial))
    return trial.done


def failure_of(work, store) -> BaseException | None:
    try:
        work(store)
    except BaseException as failure:  # noqa: BLE001
        return failure
    return None


# D1, D2
@pytest.mark.parametrize(("kind", "number"), TROUBLES, ids=lambda value: str(value))
@pytest.mark.parametrize("how", RANKS)
def test_a_failure_of_any_disk_call_fails_the_save_and_leaves_the_old_checkpoint(disk, how, kind, number):
    saving = partial(RANKS[how], 2)
    calls = calls_of(disk, saving)
    (published,) = (at for at, call in enumerate(calls) if call.startswith("remove .manifest.json"))
    for at, call in enumerate(calls):
        why = f"{how}: {kind} {errno.errorcode[number]} at call {at} ({call})"
        trial = disk.with_trouble(Trouble(at, kind, number))
        failure = failure_of(saving, store_on(trial))
        harmless = at >= published or call.startswith(READS) or not trial.struck
        assert failure is not None or harmless, why
        steps = intact_steps(store_on(trial), why)
        assert 1 in steps or 2 in steps, why
        assert 2 in steps or (1 in steps and failure is not None), why
        for seed in range(4):
            assert intact_steps(store_on(trial.crash(seed)), why) >= ({2} if failure is None else steps & {1}), why


# D1, D2, D7: a name whose sync has failed is no more durable because the next save finds it there.
def test_a_save_after_a_failed_one_is_durable_whatever_had_failed():
    disk = SimulatedDisk()
    calls = calls_of(disk, partial(save, 1))
    for at, call in enumerate(calls):
        trial = disk.with_trouble(Trouble(at, "error"))
        store = store_on(trial)
        failure_of(partial(save, 1), store)
        save(2, store)
        for seed in range(6):
            why = f"EIO at call {at} ({call}) of the save before, power loss {seed}"
            assert 2 in intact_steps(store_on(trial.crash(seed)), why), why


# D1
def test_short_writes_are_carried_on_to_the_last_byte(disk):
    for at, call in enumerate(calls_of(disk, partial(save, 2))):
        if call == "write":
            trial = disk.with_trouble(Trouble(at, "short"))
            save(2, store_on(trial))
            assert intact_steps(store_on(trial.crash(0))) == {2}


# D1, D2: training goes on or stops as the policy says, so a failure must be an outcome that the loop can judge.
@pytest.mark.parametrize("call", ["create rank-00000.shard", "write", "sync", "close", "link manifest.json"])
def test_a_save_on_a_broken_disk_gives_an_error_to_judge_and_raises_nothing(disk, call):
    trial = disk.with_trouble(Trouble(calls_of(disk, partial(save, 2)).index(call), "error", errno.ENOSPC))
    saver = saver_at(2, store_on(trial))
    (saved,) = saver.save(notes_at(2))
    saver.close()
    assert isinstance(saved.error, CheckpointError)
    assert "step-00000002.a0001 was not saved: No space left on device" in str(saved.error)
    assert saver.newest_step != 2


# D2: the checkpoint is there; saying that it is not would have the step saved once more, over its own files.
def test_a_failure_of_retention_does_not_deny_the_checkpoint_that_was_published(disk):
    calls = calls_of(disk, partial(save, 2))
    for at in (calls.index("remove manifest.json"), calls.index("remove_folder step-00000001.a0001")):
        trial = disk.with_trouble(Trouble(at, "error"))
        saver = saver_at(2, store_on(trial))
        (saved,) = saver.save(notes_at(2))
        saver.close()
        assert 2 in intact_steps(store_on(trial))
        assert "was not saved" not in str(saved.error)
        assert "Input/output error" in str(vars(saved))
        assert saver.newest_step == 2


# D1: what a failed save left is in the way of nothing, not even of the same step.
def test_a_step_whose_save_failed_can_be_saved_again(disk):
    calls = calls_of(disk, partial(save, 2))
    for at in range(calls.index("link manifest.json") + 1):
        trial = disk.with_trouble(Trouble(at, "part", errno.ENOSPC))
        saver = saver_at(2, store_on(trial))
        (first,) = saver.save(notes_at(2))
        assert first.error, f"call {at} ({calls[at]})"
        (again,) = saver.save(notes_at(2))
        saver.close()
        assert again.error is None, f"call {at} ({calls[at]}) had failed"
        assert 2 in intact_steps(store_on(trial))


# D2, K9
def test_a_failure_of_any_disk_call_of_retention_leaves_enough():
    disk = SimulatedDisk()
    for step in range(1, 5):
        save(step, store_on(disk), keep=9, parent=newest(store_on(disk)) if step > 1 else None)
    pruning = lambda store: RetentionPolicy(store, 1, 2, 0, LINEAGE).apply()  # noqa: E731
    for at, call in enumerate(calls_of(disk, pruning)):
        trial = disk.with_trouble(Trouble(at, "error"))
        failure_of(pruning, store_on(trial))
        assert intact_steps(store_on(trial), f"EIO at call {at} ({call})") >= {3, 4}


# D2, D11: a read that fails at any moment ends the restore or passes the checkpoint over; wrong numbers never come.
def test_a_read_that_fails_during_restore_never_gives_other_numbers(disk):
    save(2, store_on(disk), keep=2, parent=newest(store_on(disk)))

    def restoring(store: PosixStore, state=None):
        state = state or state_of(0)
        return restore(store, World(), LINEAGE, state, lambda _: None, fallback=True, on_damaged=lambda *_: None)

    for at, call in enumerate(calls_of(disk, restoring)):
        state, found = state_of(0), []
        store = store_on(disk.with_trouble(Trouble(at, "error")))
        failure = failure_of(lambda _, s=state, st=store, f=found: f.append(restoring(st, s)), None)
        why = f"EIO at call {at} ({call}): {failure!r}"
        if failure is None:
            assert found[0] is not None, why
            assert parameters_digest(state.items()) == parameters_digest(state_of(found[0].manifest.step).items()), why


# D11
def test_a_run_folder_that_vanishes_fails_the_next_save_at_once(tmp_path):
    store = PosixStore(tmp_path / "run")
    (tmp_path / "run").mkdir()
    save(1, store)
    shutil.rmtree(tmp_path / "run")
    failure = failure_of(partial(save, 2), store)
    assert "No such file or directory" in str(failure)
    assert not (tmp_path / "run").exists()


class Blocked(PosixCalls):
    """A disk whose syncs wait until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def sync(self, file: int) -> None:
        assert self.go.wait(20)
        super().sync(file)


# D12
def test_on_slow_storage_one_save_is_in_flight_and_the_skipped_ones_are_counted(tmp_path):
    calls = Blocked()
    saver = saver_at(1, PosixStore(tmp_path, calls))
    saver.config = replace(saver.config, mode="async", every=1)
    assert saver.due(1)
    assert saver.save(notes_at(1)) == []
    host = saver.stager
    assert not any(saver.due(step) for step in (2, 3, 4))
    assert not (tmp_path / "checkpoints" / "step-00000001.a0001" / "manifest.json").exists()
    calls.go.set()
    (saved,) = saver.wait()
    assert (saved.step, saved.skipped, saved.error) == (1, 3, None)
    assert saver.due(5)
    saver.save(notes_at(5), wait=True)
    assert saver.stager is host  # the same host memory, whatever was skipped
    saver.close()
