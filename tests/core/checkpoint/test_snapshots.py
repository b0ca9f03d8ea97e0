"""Snapshots in the memory of hosts: saved beside checkpoints, verified, fenced, and restored where they are newer."""

from __future__ import annotations

import pytest

from meshwright.base.checkpoint.listing import checkpoint_folder, list_published
from meshwright.base.config import CheckpointConfig
from meshwright.base.records.events import EventLog, read_events
from meshwright.base.store.posix import PosixStore
from meshwright.core import faults
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointSaver
from meshwright.core.checkpoint.snapshots.schedule import SnapshotSchedule
from meshwright.core.checkpoint.state import parameters_digest
from meshwright.core.parallel.world import World
from tests.core.checkpoint.checkpoint_fixtures import ATTEMPT_FIELDS, LINEAGE, digest_at, metadata_at, state_at
from tests.kit.memory_hosts import MemoryHosts

SHARD = "rank-00000.shard"
PART = "rank-00000.part.json"


class RunOnHosts:
    """A run of one rank on host a, whose next host is b, in one attempt after another."""

    def __init__(self, base, names: str = "abc") -> None:
        self.base, self.hosts, self.store = base, MemoryHosts(base, names), PosixStore(base / "run")
        self.placed, self.clock, self.step = names, 0.0, 0
        (base / "run").mkdir()
        self.begin(1)

    def begin(self, attempt: int, names: str = "", **options) -> None:
        """Begins an attempt on some of the hosts."""
        self.attempt, self.placed = attempt, names or self.placed
        self.memory = self.hosts.store(attempt, self.placed[0], self.placed)
        values = {"mode": "async", "seconds": 0.0, "memory_every": 1, "overhead": 1.0} | options
        fields = ATTEMPT_FIELDS | {"base": {}}
        self.saver = CheckpointSaver(
            CheckpointConfig(**values), self.store, World(), LINEAGE, attempt, fields, lambda: state_at(self.step)
        )
        self.log = EventLog(self.base / f"events-{attempt}.jsonl", attempt, 0)
        self.schedule = SnapshotSchedule(self.memory, self.saver, self.log, lambda: self.clock)
        self.incomplete: list[str] = []
        self.damaged: list[str] = []

    def save(self, step: int, in_memory: bool) -> str:
        """Saves and waits; returns the error of the save, '' if it has none."""
        self.step = step
        assert self.schedule.save(metadata_at(step), in_memory) == []
        (result,) = self.saver.wait()
        assert self.schedule.record([result]) == ([] if in_memory else [result])
        return str(result.error or "")

    def restore(self):
        """What a run restores, after its tensors were compared with those of that step."""
        state = state_at(0)
        result = restore(
            self.store,
            World(),
            LINEAGE,
            state,
            lambda _: None,
            fallback=True,
            on_damaged=lambda name, _: self.damaged.append(name),
            memory=self.memory,
            on_incomplete=lambda step, reason: self.incomplete.append(f"{step}: {reason}"),
        )
        if result is not None:
            assert parameters_digest(state.items()) == digest_at(result.manifest.step)
            self.saver.continue_from(result.manifest, bool(result.hosts))
        return result

    def events(self, kind: str) -> list:
        return [event for event in read_events(self.base / f"events-{self.attempt}.jsonl") if event["kind"] == kind]

    def files(self, host: str) -> set[tuple[int, str]]:
        """(step, file) of every file in the memory of a host."""
        names = [name.split("/")[1:] for name in self.hosts[host].keeper.files()]
        return {(int(folder[5:13]), file) for folder, file in names}


@pytest.fixture
def run(tmp_path):
    run = RunOnHosts(tmp_path)
    yield run
    run.hosts.close()


def test_snapshot_is_on_the_own_host_and_on_the_next_and_its_manifest_on_all(run):
    assert run.save(3, in_memory=True) == ""
    assert run.files("a") == run.files("b") == {(3, SHARD), (3, PART), (3, "manifest.json")}
    assert run.files("c") == {(3, "manifest.json")}
    (event,) = run.events("snapshot")
    assert (event["step"], event["skipped"]) == (3, 0)
    assert list_published(run.store) == []


def test_two_newest_snapshots_are_kept(run):
    for step in (1, 2, 3):
        assert run.save(step, in_memory=True) == ""
    assert {step for step, _ in run.files("a")} == {step for step, _ in run.files("c")} == {2, 3}
    run.begin(2)
    run.restore()
    assert run.save(4, in_memory=True) == ""
    assert {step for step, _ in run.files("b")} == {3, 4}


def test_newer_of_snapshot_and_checkpoint_is_restored(run):
    run.save(5, in_memory=False)
    run.save(7, in_memory=True)
    run.begin(2)
    result = run.restore()
    assert (result.manifest.step, result.hosts, result.published_step) == (7, ["a", "b"], 5)
    run.save(9, in_memory=False)
    newest, before = list_published(run.store)
    assert newest.manifest.parent == before.manifest.digest
    assert (newest.manifest.ordinal, before.manifest.ordinal) == (1, 0)
    run.begin(3)
    result = run.restore()
    assert (result.manifest.step, result.hosts) == (9, [])


def test_snapshot_survives_the_loss_of_either_host(run):
    run.save(5, in_memory=False)
    run.save(7, in_memory=True)
    run.hosts["a"].lose()
    run.begin(2, "cb")
    result = run.restore()
    assert (result.manifest.step, result.hosts, run.incomplete) == (7, ["b"], [])


def test_checkpoint_is_restored_if_both_hosts_of_a_snapshot_are_lost(run):
    run.save(5, in_memory=False)
    run.save(7, in_memory=True)
    run.hosts["a"].lose()
    run.hosts["b"].lose()
    run.begin(2, "cb")
    result = run.restore()
    assert (result.manifest.step, result.hosts, run.damaged) == (5, [], [])
    (message,) = run.incomplete
    assert message.startswith(f"7: 2 of 2 files are on no host that is left ({SHARD}); b: 127.0.0.1:")


def test_run_without_a_checkpoint_starts_again_if_its_snapshots_are_lost(run):
    run.save(7, in_memory=True)
    run.hosts["a"].lose()
    run.hosts["b"].lose()
    run.begin(2, "c")
    assert run.restore() is None


def test_flipped_byte_is_detected_and_the_older_snapshot_is_restored(run):
    run.save(6, in_memory=True)
    run.save(7, in_memory=True)
    for host in "ab":
        path = run.hosts[host].keeper.folder / checkpoint_folder(7, 1) / SHARD
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    run.begin(2)
    result = run.restore()
    assert (result.manifest.step, result.hosts, run.damaged) == (6, ["a", "b"], ["step-00000007.a0001"])


def test_damaged_snapshot_does_not_end_a_run_without_a_checkpoint(run):
    run.save(7, in_memory=True)
    for host in "ab":
        path = run.hosts[host].keeper.folder / checkpoint_folder(7, 1) / SHARD
        path.write_bytes(bytes(path.stat().st_size))
    run.begin(2)
    assert run.restore() is None
    assert run.damaged == ["step-00000007.a0001"]


def test_snapshot_of_a_history_that_was_left_is_not_restored(run):
    """Host c comes back with a snapshot that an attempt without it did not see."""
    run.save(5, in_memory=False)
    run.save(8, in_memory=True)
    run.begin(2, "c")
    run.memory.index = {}
    run.save(6, in_memory=False)
    run.begin(3, "abc")
    assert run.restore().manifest.step == 6


def test_fenced_attempt_publishes_no_snapshot_and_the_training_continues(run):
    run.hosts["b"].keeper.fence(2)
    assert "attempt 1 is over" in run.save(3, in_memory=True)
    assert "attempt 1 is over" in run.save(4, in_memory=True)
    (event,) = run.events("snapshot_failed")
    assert event["step"] == 3
    assert "host b" in event["message"]
    assert run.files("a") == run.files("b") == run.files("c") == set()
    assert run.save(5, in_memory=False) == ""


def test_failed_write_leaves_no_snapshot(run, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_FAULT", "save.write:enospc")
    faults.arm(0, 0)
    try:
        assert "No space left" in run.save(3, in_memory=True)
    finally:
        monkeypatch.delenv("MESHWRIGHT_FAULT")
        faults.arm(0, 0)
    assert run.save(4, in_memory=True) == ""
    assert {step for step, _ in run.files("a")} == {4}
    assert run.hosts["b"].keeper.parts == set()


def test_lost_next_host_fails_the_snapshot_and_not_the_training(run):
    run.hosts["b"].lose()
    assert run.save(3, in_memory=True)
    assert run.save(4, in_memory=False) == ""


def test_snapshot_is_due_every_few_steps_unless_a_save_is_in_flight(run):
    run.begin(2, memory_every=3)
    assert [step for step in range(1, 10) if run.schedule.due(step)] == [3, 6, 9]
    run.save(6, in_memory=False)
    assert not run.schedule.due(6)
    assert run.schedule.skipped == 0


def test_snapshots_take_at_most_the_overhead(run):
    run.begin(2, overhead=0.01)
    assert run.schedule.due(1)
    run.save(1, in_memory=True)
    stall = run.schedule.next_begin * 0.01
    assert stall > 0
    assert not run.schedule.due(2)
    assert run.schedule.skipped == 1
    run.clock = 101 * stall
    assert run.schedule.due(3)


def test_checkpoint_by_steps_waits_for_a_snapshot_and_one_by_time_is_postponed(run, monkeypatch):
    run.begin(2, every=4, seconds=1.0)
    monkeypatch.setattr(CheckpointSaver, "is_saving", True)
    run.saver.snapshot_in_flight = True
    run.saver.begin_time -= 100
    assert not run.saver.due(3)
    assert run.saver.due(4)
    assert run.saver.skipped == 0
    assert not run.schedule.due(3)
    assert run.schedule.skipped == 1
    run.saver.snapshot_in_flight = False
    assert not run.saver.due(4)
    assert run.saver.skipped == 1


def test_job_on_one_host_makes_no_snapshots_and_restores_those_it_has(run):
    run.save(7, in_memory=True)
    run.begin(2, "b")
    assert not run.schedule.due(8)
    assert run.restore().hosts == ["b"]
