"""Tests of the history of a run: what is read, how it grows, and that no folder makes it fail."""

from __future__ import annotations

import json
import math
import os
import shutil

import numpy as np
import pytest

from meshwright.base.history import event_tail, rank_steps
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import COLUMNS
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from tests.kit.recorded_history import BEGIN, RecordedRun


@pytest.fixture
def run(tmp_path):
    """Attempt 1 fails after step 5, attempt 2 continues at step 4 and completes step 7."""
    run = RecordedRun(tmp_path / "run", steps=8)
    run.start()
    for step in range(6):
        run.step(step, **({"counted": True} if step == 1 else {}))
        if step == 3:
            run.save(4)
    run.end("failed", rank=1, step=6, phase="forward", message="killed by signal 9 (SIGKILL)")
    run.start(restart=1, first_step=4)
    for step in range(4, 8):
        run.step(step)
    run.end()
    return run


def test_history_has_attempts_steps_checkpoints_and_incidents(run):
    history = run.history()
    assert [(one.number, one.first_step, one.done, one.outcome) for one in history.attempts] == [
        (1, 0, 6, "failed"),
        (2, 4, 8, "complete"),
    ]
    assert history.attempts[0].incident.rank == 1
    assert (history.attempts[0].started, history.attempts[1].ended) == (BEGIN, run.now)
    assert history.ranks == [0, 1]
    assert history.steps().step.tolist() == [*range(6), *range(4, 8)] == history.steps(1).step.tolist()
    assert history.steps().attempt.tolist() == [1] * 6 + [2] * 4
    assert [(found.step, found.state, found.bytes) for found in history.checkpoints] == [(4, "published", 1000)]
    assert history.total_steps == 8
    assert not history.is_alive


def test_survived_steps_are_those_of_the_last_attempt_and_timed_steps_are_typical(run):
    table = run.history().steps()
    assert table.survived().step.tolist() == list(range(8))
    assert table.survived().attempt.tolist() == [1] * 4 + [2] * 4
    assert [(a, s) for a, s in zip(table.timed().attempt, table.timed().step, strict=True)] == [
        *((1, step) for step in (2, 3, 4, 5)),
        *((2, step) for step in (6, 7)),
    ]
    assert table.exposed_source == "host waits"
    assert math.isnan(table.noise_scale[0])


def test_decimated_steps_keep_the_smallest_and_the_largest_value(run):
    run.step(8)
    bins = run.history().steps().select(slice(0, 6)).decimated(2)
    assert len(bins) == 2
    assert bins.step.tolist() == [0, 3]
    assert bins.low.loss == pytest.approx([4.98, 4.95])
    assert bins.high.loss == pytest.approx([5.0, 4.97])
    assert bins.mean.loss == pytest.approx([4.99, 4.96])


def test_update_reads_what_was_appended(run):
    history = run.history()
    before = len(history.steps())
    run.start(restart=2, first_step=8)
    run.step(8)
    history.update()
    assert len(history.steps()) == before + 1
    assert history.attempts[-1].number == 3
    assert history.attempts[-1].done == 9
    history.update()
    assert len(history.steps()) == before + 1


def test_a_torn_line_is_read_once_it_is_replaced_by_a_complete_one(run):
    history = run.history()
    path = run.folder.events(0)
    complete = path.stat().st_size
    with path.open("a") as file:
        file.write('{"kind":"step","step":99,"atte')
    history.update()
    os.truncate(path, complete)  # the next attempt removes it
    run.step(8)
    history.update()
    assert history.steps().step[-1] == 8


def test_a_folder_with_a_new_run_is_read_from_the_beginning(run, tmp_path):
    history = run.history()
    os.rename(run.root, tmp_path / "old")
    new = RecordedRun(run.root, steps=3)
    new.start()
    new.step(0)
    history.update()
    assert history.steps().step.tolist() == [0]
    assert [attempt.number for attempt in history.attempts] == [1]
    assert not history.checkpoints


def test_deleted_and_damaged_checkpoints_are_told_from_published_ones(run):
    history = run.history()
    run.write("damaged", checkpoint="step-00000004.a0001", damage=[])
    run.save(8)
    run.save(9)
    shutil.rmtree(run.root / "checkpoints" / "step-00000008.a0002")
    history.update()
    assert [(found.step, found.state) for found in history.checkpoints] == [
        (4, "damaged"),
        (8, "deleted"),
        (9, "published"),
    ]


def test_a_checkpoint_whose_record_is_lost_is_found_on_disk(run):
    folder = run.root / "checkpoints" / "step-00000006.a0002"
    folder.mkdir()
    assert 6 not in [found.step for found in run.history().checkpoints]
    (folder / "manifest.json").write_text("{}")
    assert 6 in [found.step for found in run.history().checkpoints]


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder; expected a folder that meshwright train wrote"):
        RunHistory(RunFolder(tmp_path))


def test_large_files_of_other_ranks_are_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_steps, "NEWEST_BYTES", 20_000)
    monkeypatch.setattr(rank_steps, "OTHER_RANKS_BYTES", 0)
    monkeypatch.setattr(rank_steps, "SAMPLES", 8)
    run = RecordedRun(tmp_path / "run")
    run.start()
    for step in range(400):
        run.step(step)
    history = run.history()
    steps = history.steps(1).step
    assert history.steps(0).step.tolist() == list(range(400))
    assert steps[-30:].tolist() == list(range(370, 400))
    assert 40 < len(steps) < 100
    assert (np.diff(steps) > 0).all()
    assert (steps < 200).sum() >= 3
    run.step(400)
    history.update()
    assert history.steps(1).step[-1] == 400


def test_a_large_file_of_rank_0_keeps_every_event_and_a_part_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_steps, "FULL_BYTES", 20_000)
    monkeypatch.setattr(rank_steps, "NEWEST_STEPS", 10)
    run = RecordedRun(tmp_path / "run", ranks=1)
    run.start()
    for step in range(200):
        run.step(step)
        run.write("eval", step=step, loss=1.0, tokens=10)
    history = run.history()
    assert len(history.evaluations) == 200
    assert history.steps().step[-10:].tolist() == list(range(190, 200))
    assert 15 < len(history.steps()) < 100


HOSTILE = [
    b"",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"{}",
    b"[" * 100_000,
    b'{"kind":[]}',
    b'{"kind":"start","attempt":1,"rank":0,"ranks":-4,"steps":"many","pipeline":[1],"time":"now"}',
    b'{"kind":"start","attempt":null}',
    b'{"kind":"step","attempt":1,"step":1e999,"seconds":1}',
    b'{"kind":"step","attempt":1,"step":3,"seconds":NaN}',
    b'{"kind":"step","attempt":1,"step":3,"seconds":1,"loss":NaN,"phases":[],"waits":4,"begin":-1e300,"time":{}}',
    b'{"kind":"step","attempt":1,"step":4,"seconds":1e-9,"phases":{"sync":-5,"forward":1e30},"time":1e300}',
    b'{"kind":"step","attempt":1,"step":5,"seconds":1,"begin":4e18,"time":4e18,"outside":{"save":4e18,"start":-4e18}}',
    b'{"kind":"step","attempt":1,"step":6,"seconds":999999,"begin":3.9e9}',
    b'{"kind":"step","attempt":1,"step":7,"seconds":999999,"begin":0}',
    b'{"kind":"step","attempt":1,"step":8,"seconds":999999,"begin":3.9e9}',
    b'{"kind":"step","attempt":1,"step":9,"seconds":1e-9,"begin":0}',
    b'{"kind":"step","attempt":1,"step":8,"seconds":999999,"begin":3.9e9}',
    b'{"kind":"step","attempt":1,"step":9,"seconds":1e-9,"begin":0}',
    b'{"kind":"step","attempt":99999999999999999999,"step":4,"seconds":1}',
    b'{"kind":"checkpoint","attempt":1,"rank":0,"step":-7,"time":1}',
    b'{"kind":"checkpoint","attempt":1,"rank":0,"step":9007199254740991,"stall_seconds":1e308,"time":1}',
    b'{"kind":"experts","attempt":1,"rank":0,"step":1,"loads":[[1,2],[3]],"dropped":[{}]}',
    b'{"kind":"eval","attempt":1,"rank":0,"step":1,"loss":"x","metrics":{"a":[]},"time":null}',
    b'{"kind":"straggler","attempt":1,"rank":1,"step":1,"factor":null,"message":5}',
    b'{"kind":"restored","attempt":1,"rank":0,"step":0,"seconds":-1e9,"changes":[5]}',
    b'{"kind":"end","attempt":1,"rank":0,"steps":1,"outside":{"save":-1e300,"evaluate":1e300}}',
    b'{"kind":"counters","attempt":1,"rank":0,"step":1,"communication":[[]],"memory":{"peak_total":-1}}',
    b'{"kind":"attempt_start","attempt":1,"rank":-1,"restart":0,"time":-1e300,"command_started":1e300}',
    b'{"kind":"hang","attempt":1,"rank":-1,"message":"\\u001b[2J"}',
]


@pytest.mark.parametrize("order", [1, -1])
def test_hostile_records_never_raise(tmp_path, order):
    from meshwright.base.history.goodput import goodput
    from meshwright.base.history.signals import read_signals

    run = RecordedRun(tmp_path / "run")
    run.start(seconds=0.0)
    content = b"\n".join(HOSTILE[::order]) + b"\n" + b"x" * 3_000_000 + b"\n"
    for name in ("rank-00000.jsonl", "rank-00001.jsonl", "rank-1.jsonl", "rank-9999999.jsonl", "supervisor.jsonl"):
        with (run.root / "events" / name).open("ab") as file:
            file.write(content)
    run.step(5)
    (run.root / "events" / "rank-00007.jsonl").symlink_to("/etc/passwd")
    os.mkfifo(run.root / "events" / "rank-00008.jsonl")
    (run.root / "run.toml").write_bytes(b"steps = 'many'\n[compile]\nenabled = 3\n")
    (run.root / "plan.json").write_bytes(b"[" * 1000)
    (run.folder.attempt(1) / "incident.json").write_text(json.dumps({"outcome": "failed", "rank": "x", "message": 7}))
    (run.folder.attempt(1) / "lease.json").write_text("{}")
    (run.folder.attempt(1) / "heartbeat-00000").write_bytes(b"MESHBEAT" + b"\xff" * 4088)
    (run.folder.attempt(1) / "heartbeat-00001").symlink_to("/dev/zero")
    history = run.history()
    history.update()
    result = goodput(history, run.now)
    assert sum(result.nanoseconds.values()) == result.wall_nanoseconds
    assert min(result.nanoseconds.values()) >= 0
    assert read_signals(history, run.now).state
    assert history.steps().step[-1] == 5
    assert history.steps().rows.shape[1] == len(COLUMNS)


def test_a_folder_with_very_many_files_is_read_within_bounds(tmp_path, monkeypatch):
    from meshwright.base.history import liveness

    monkeypatch.setattr(liveness, "MAX_NAMES", 100)
    run = RecordedRun(tmp_path / "run", ranks=1)
    run.start()
    for rank in range(1, 300):
        (run.root / "events" / f"rank-{rank:05d}.jsonl").write_text("")
    history = run.history()
    assert len(history.ranks) <= 101
    assert history.ranks[0] == 0


def test_a_line_without_end_does_not_stop_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(event_tail, "MAX_LINE_BYTES", 4096)
    run = RecordedRun(tmp_path / "run", ranks=1)
    run.start()
    with run.folder.events(0).open("a") as file:
        file.write("y" * 10_000)
    history = run.history()
    with run.folder.events(0).open("a") as file:
        file.write("y" * 10_000 + "\n")
    run.step(3)
    history.update()
    assert history.steps().step.tolist() == [3]
