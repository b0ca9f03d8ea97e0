"""Spans are one line per step, bounded by rotation, and never end a training."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from meshwright.base.records import spans
from meshwright.base.records.spans import SpanLog, older_file
from meshwright.core.telemetry import collective_waits
from meshwright.core.telemetry.step_clock import StepClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace" / "rank-00000.spans.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_span_of_a_step_has_the_order_of_phases_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 10.6, 10.9, 11.0, 11.25])
    monkeypatch.setattr(collective_waits.time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    clock.enter("forward")
    clock.enter("backward")
    clock.waits.measure(lambda: None)
    clock.enter("forward")
    clock.close()
    assert clock.span() == {
        "phases": [("forward", 0), ("backward", 500_000), ("forward", 1_000_000)],
        "end": 1_250_000,
        "waits": [(600_000, 900_000)],
    }


def test_span_files_are_bounded_by_rotation_and_begin_with_the_rank(path: Path) -> None:
    log = SpanLog(path, 3, {"rank": 0}, max_bytes=2000)
    for step in range(100):
        log.write("step", step=step)
    log.close()
    older, newer = lines(older_file(path)), lines(path)
    assert [older[0], newer[0]] == [{"kind": "rank", "attempt": 3, "rank": 0}] * 2
    steps = [line["step"] for line in older + newer if line["kind"] == "step"]
    assert steps == list(range(steps[0], 100))
    assert sorted(os.listdir(path.parent)) == ["rank-00000.spans.1.jsonl", "rank-00000.spans.jsonl"]
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 2 * 2100


def test_span_log_continues_after_a_torn_line_of_a_killed_attempt(path: Path) -> None:
    SpanLog(path, 1, {"rank": 0}).close()
    path.write_text(path.read_text() + '{"kind":"st')
    log = SpanLog(path, 2, {"rank": 0})
    log.write("step", step=0)
    assert [(line["kind"], line["attempt"]) for line in lines(path)] == [("rank", 1), ("rank", 2), ("step", 2)]


def test_spans_that_cannot_be_written_are_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = SpanLog(path, 1, {"rank": 0}), os.write

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(spans.os, "write", full)
        log.write("step", step=0)
        disk.setattr(spans.os, "write", lambda file, content: write(file, content[:5]))
        log.write("step", step=1)
    log.write("step", step=2)
    assert [line["step"] for line in lines(path) if line["kind"] == "step"] == [2]


def test_spans_of_a_save_cover_its_stall_and_its_background_work(path: Path) -> None:
    log = SpanLog(path, 1, {"rank": 0})
    with log.span("save", 20):
        pass
    log.checkpoint(20, 1.5)
    log.checkpoint(20, 1.5)  # of a save that another attempt began: its begin is not known
    _, save, background = lines(path)
    assert (save["name"], background["name"], background["seconds"]) == ("save", "checkpoint", 1.5)
    assert save["begin"] == background["begin"]
