"""Storage errors: on a full, failing, slow or vanished disk a save reports its failure and damages no checkpoint."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from meshwright.base.store.posix import PosixCalls, PosixStore
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.state import parameters_digest
from meshwright.core.parallel.world import World
from meshwright.errors import CheckpointError
from tests.core.checkpoint.checkpoint_fixtures import (
    LINEAGE,
    intact_steps,
    metadata_at,
    newest,
    save,
    save_on_two_ranks,
    saver_at,
    state_at,
)
from tests.core.checkpoint.simulated_disk import DiskFault, SimulatedDisk, open_store

READS = ("list_names", "size", "read")
DISK_FAULTS = [("error", errno.ENOSPC), ("error", errno.EIO), ("late", errno.EIO), ("part", errno.ENOSPC)]
RANKS = {"1 rank": save, "2 ranks": partial(save_on_two_ranks, seed=1)}


def record_calls(disk: SimulatedDisk, task) -> list[str]:
    trial = disk.with_fault()
    task(open_store(trial))
    return trial.calls


def catch_failure(task, store) -> BaseException | None:
    try:
        task(store)
    except BaseException as failure:  # noqa: BLE001
        return failure
    return None


@pytest.mark.parametrize(("kind", "number"), DISK_FAULTS, ids=lambda value: str(value))
@pytest.mark.parametrize("how", RANKS)
def test_error_at_any_call_fails_the_save_and_keeps_the_old_checkpoint(disk, how, kind, number):
    saving = partial(RANKS[how], 2)
    calls = record_calls(disk, saving)
    (published,) = (at for at, call in enumerate(calls) if call.startswith("remove .manifest.json"))
    for at, call in enumerate(calls):
        context = f"{how}: {kind} {errno.errorcode[number]} at call {at} ({call})"
        trial = disk.with_fault(DiskFault(at, kind, number))
        failure = catch_failure(saving, open_store(trial))
        harmless = at >= published or call.startswith(READS) or not trial.fault_raised
        assert failure is not None or harmless, context
        steps = intact_steps(open_store(trial), context)
        assert 1 in steps or 2 in steps, context
        assert 2 in steps or (1 in steps and failure is not None), context
        for seed in range(4):
            assert intact_steps(open_store(trial.crash(seed)), context) >= ({2} if failure is None else steps & {1}), (
                context
            )


# A name whose sync has failed does not become durable because the next save finds it.
def test_save_after_a_failed_save_is_durable():
    disk = SimulatedDisk()
    calls = record_calls(disk, partial(save, 1))
    for at, call in enumerate(calls):
        trial = disk.with_fault(DiskFault(at, "error"))
        store = open_store(trial)
        catch_failure(partial(save, 1), store)
        save(2, store)
        for seed in range(6):
            context = f"EIO at call {at} ({call}) of the save before, power loss {seed}"
            assert 2 in intact_steps(open_store(trial.crash(seed)), context), context


def test_short_writes_are_continued_to_the_last_byte(disk):
    for at, call in enumerate(record_calls(disk, partial(save, 2))):
        if call == "write":
            trial = disk.with_fault(DiskFault(at, "short"))
            save(2, open_store(trial))
            assert intact_steps(open_store(trial.crash(0))) == {2}


# The trainer decides whether to continue, so a failure is part of the result and not an exception.
@pytest.mark.parametrize("call", ["create rank-00000.shard", "write", "sync", "close", "link manifest.json"])
def test_failed_save_returns_its_error_and_raises_nothing(disk, call):
    trial = disk.with_fault(DiskFault(record_calls(disk, partial(save, 2)).index(call), "error", errno.ENOSPC))
    saver = saver_at(2, open_store(trial))
    (saved,) = saver.save(metadata_at(2))
    saver.close()
    assert isinstance(saved.error, CheckpointError)
    assert "step-00000002.a0001 was not saved: No space left on device" in str(saved.error)
    assert saver.newest_step != 2


@pytest.mark.parametrize("call", ["link manifest.json", "sync_folder step-00000002.a0001"])
def test_save_whose_publication_has_failed_late_may_be_published(disk, call):
    calls = record_calls(disk, partial(save, 2))
    at = calls.index(call, calls.index("link manifest.json"))
    saver = saver_at(2, open_store(disk.with_fault(DiskFault(at, "late"))))
    (saved,) = saver.save(metadata_at(2))
    saver.close()
    assert "step-00000002.a0001 may be published, which is unknown: Input/output error" in str(saved.error)


def test_error_after_the_publication_does_not_say_that_nothing_was_saved(disk):
    calls = record_calls(disk, partial(save, 2))
    at = next(at for at in range(calls.index("link manifest.json"), len(calls)) if calls[at].startswith("read"))
    saver = saver_at(2, open_store(disk.with_fault(DiskFault(at, "error"))))
    (saved,) = saver.save(metadata_at(2))
    saver.close()
    assert "step-00000002.a0001 is published, but " in str(saved.error)


def test_save_on_a_slow_link_makes_progress_until_the_limit_of_its_request(disk):
    store = open_store(disk)
    saver = saver_at(2, store)
    store.request_end = time.monotonic() + 1000  # as an object store
    assert saver._has_progressed()
    store.request_end = time.monotonic()
    assert not saver._has_progressed()
    saver.close()


# The checkpoint is published: reporting a failed save would save the same step again, over its own files.
def test_retention_error_does_not_fail_a_published_save(disk):
    calls = record_calls(disk, partial(save, 2))
    for at in (calls.index("remove manifest.json"), calls.index("remove_folder step-00000001.a0001")):
        trial = disk.with_fault(DiskFault(at, "error"))
        saver = saver_at(2, open_store(trial))
        (saved,) = saver.save(metadata_at(2))
        saver.close()
        assert 2 in intact_steps(open_store(trial))
        assert "was not saved" not in str(saved.error)
        assert "Input/output error" in str(vars(saved))
        assert saver.newest_step == 2


# The files of a failed save do not prevent another save of the same step.
def test_step_can_be_saved_again_after_a_failed_save(disk):
    calls = record_calls(disk, partial(save, 2))
    for at in range(calls.index("link manifest.json") + 1):
        trial = disk.with_fault(DiskFault(at, "part", errno.ENOSPC))
        saver = saver_at(2, open_store(trial))
        (first,) = saver.save(metadata_at(2))
        assert first.error, f"call {at} ({calls[at]})"
        (again,) = saver.save(metadata_at(2))
        saver.close()
        assert again.error is None, f"call {at} ({calls[at]}) had failed"
        assert 2 in intact_steps(open_store(trial))


def test_error_at_any_call_of_retention_keeps_enough_checkpoints():
    disk = SimulatedDisk()
    for step in range(1, 5):
        save(step, open_store(disk), keep=9, parent=newest(open_store(disk)) if step > 1 else None)
    pruning = lambda store: RetentionPolicy(store, 1, 2, 0, LINEAGE).apply()  # noqa: E731
    for at, call in enumerate(record_calls(disk, pruning)):
        trial = disk.with_fault(DiskFault(at, "error"))
        catch_failure(pruning, open_store(trial))
        assert intact_steps(open_store(trial), f"EIO at call {at} ({call})") >= {3, 4}


# A failed read ends the restore or skips the checkpoint; it never gives wrong values.
def test_read_error_during_restore_never_gives_wrong_values(disk):
    save(2, open_store(disk), keep=2, parent=newest(open_store(disk)))

    def restoring(store: PosixStore, state=None):
        state = state or state_at(0)
        return restore(store, World(), LINEAGE, state, lambda _: None, fallback=True, on_damaged=lambda *_: None)

    for at, call in enumerate(record_calls(disk, restoring)):
        state, found = state_at(0), []
        store = open_store(disk.with_fault(DiskFault(at, "error")))
        failure = catch_failure(lambda _, s=state, st=store, f=found: f.append(restoring(st, s)), None)
        context = f"EIO at call {at} ({call}): {failure!r}"
        if failure is None:
            assert found[0] is not None, context
            assert parameters_digest(state.items()) == parameters_digest(state_at(found[0].manifest.step).items()), (
                context
            )


def test_removed_run_folder_fails_the_next_save(tmp_path):
    store = PosixStore(tmp_path / "run")
    (tmp_path / "run").mkdir()
    save(1, store)
    shutil.rmtree(tmp_path / "run")
    failure = catch_failure(partial(save, 2), store)
    assert "No such file or directory" in str(failure)
    assert not (tmp_path / "run").exists()


class BlockedDisk(PosixCalls):
    """A disk whose syncs block until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def sync(self, file: int) -> None:
        assert self.release.wait(20)
        super().sync(file)


def test_slow_storage_keeps_one_save_in_flight_and_counts_skipped_saves(tmp_path):
    calls = BlockedDisk()
    saver = saver_at(1, PosixStore(tmp_path, calls))
    saver.config = replace(saver.config, mode="async", every=1)
    assert saver.due(1)
    assert saver.save(metadata_at(1)) == []
    stager = saver.stager
    assert not any(saver.due(step) for step in (2, 3, 4))
    assert not (tmp_path / "checkpoints" / "step-00000001.a0001" / "manifest.json").exists()
    calls.release.set()
    (saved,) = saver.wait()
    assert (saved.step, saved.skipped, saved.error) == (1, 3, None)
    assert saver.due(5)
    saver.save(metadata_at(5), wait=True)
    assert saver.stager is stager  # the host buffers are reused
    saver.close()
