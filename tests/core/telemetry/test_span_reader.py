"""Spans of several ranks are read step by step, on the clock of rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import (
    MAX_SPANS,
    OtherSpan,
    RankPlace,
    StepSpanRecord,
    newest_step,
    read_rank_spans,
    read_spans,
)
from meshwright.base.records.spans import SpanLog


def write_steps(folder: RunFolder, rank: int, attempt: int, steps: range, max_bytes: int = 1 << 20) -> SpanLog:
    log = SpanLog(folder.spans(rank), attempt, {"rank": rank, "clock_offset": float(rank)}, max_bytes)
    for step in steps:
        log.write("step", step=step, begin=1000.0 + step + rank, phases=[("fetch", 0), ("update", 5)], end=9, waits=[])
    return log


def test_spans_of_ranks_are_grouped_by_attempt_and_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_steps(folder, 0, 1, range(0, 3)).close()
    write_steps(folder, 1, 1, range(0, 2)).close()  # killed before it recorded step 2
    for rank in (0, 1):
        log = write_steps(folder, rank, 2, range(1, 4))
        with log.span("evaluate", 4):
            pass
        log.close()
    groups = [[span for span in group if isinstance(span, StepSpanRecord)] for group in read_spans(folder)]
    found = [[(span.place.rank, span.attempt, span.step) for span in group] for group in groups]
    complete = [
        [(rank, attempt, step) for rank in (0, 1)] for attempt, step in ((1, 0), (1, 1), (2, 1), (2, 2), (2, 3))
    ]
    assert found == [*complete[:2], [(0, 1, 2)], *complete[2:]]
    assert all(len({span.begin for span in group}) == 1 for group in groups)  # the offset of rank 1 is subtracted
    assert newest_step(folder, 0) == 3


def test_spans_of_selected_steps_continue_over_rotated_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_steps(folder, 0, 1, range(0, 40), max_bytes=3000).close()
    assert len(list(folder.trace.iterdir())) == 2
    spans = list(read_rank_spans(folder, 0, [range(30, 33), range(38, 50)]))
    assert [span.step for span in spans] == [30, 31, 32, 38, 39]


def test_number_of_spans_between_two_steps_is_bounded(tmp_path: Path) -> None:
    log = write_steps(RunFolder(tmp_path), 0, 1, range(0, 1))
    for _ in range(2 * MAX_SPANS):
        log.write("span", name="save", step=1, begin=2000.0, seconds=1.0)
    (group,) = read_spans(RunFolder(tmp_path))
    assert len(group) == MAX_SPANS
    assert isinstance(group[-1], OtherSpan)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (RankPlace(0), "rank 0"),
        (RankPlace(3, coordinates={"pipeline": 1, "tensor": 0}, stages=(1,)), "rank 3 (stage 1, tensor 0)"),
        (RankPlace(1, coordinates={"pipeline": 1}, stages=(1, 2)), "rank 1 (stages 1 and 2)"),
    ],
)
def test_rank_is_named_by_its_place_in_the_layout(place: RankPlace, name: str) -> None:
    assert place.name == name
