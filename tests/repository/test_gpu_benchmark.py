"""The GPU benchmark: every row runs on the CPU with tiny models, and its page shows the stored result."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import command
from benchmarks.gpu.rows import PAIRS
from benchmarks.gpu.session import Session, targets
from benchmarks.gpu.shapes import SHAPES, tiny
from benchmarks.gpu.speed_page import PAGE, RESULTS, render
from meshwright.testing import run_ranks

CHEAP = ("ceiling", "numerics", "eager", "fsdp")
REST = tuple(row for row in command.ROWS if row not in CHEAP)


def test_speed_page_shows_the_stored_result():
    page = PAGE.read_text()
    assert render(page, json.loads(RESULTS.read_text())) == page


def run_rows(_world, path, rows):
    """In a process of its own: DDP and FSDP2 keep the process groups of their rows."""
    session = Session(torch.device("cpu"), 1, 3600.0, path, {}, command.about(torch.device("cpu")), tiny)
    command.run_rows(session, ["b"], {row: {"b"} for row in rows}, 0.1)
    return session.result


@pytest.mark.parametrize("rows", [CHEAP, pytest.param(REST, marks=pytest.mark.long)])
def test_rows_of_the_gpu_benchmark_run_on_cpu_and_are_stored_as_they_are_measured(tmp_path, rows):
    path = tmp_path / "gpu.json"
    [result] = run_ranks(run_rows, 1, path, rows, timeout=230.0)
    stored = json.loads(path.read_text())
    assert stored == result
    assert not [row["error"] for row in stored["rows"] if "error" in row]
    assert {row["row"] for row in stored["rows"]} | {row["row"] for row in stored["skipped"]} == {*rows} - {"ceiling"}
    assert all(row["met"] for row in stored["rows"] if row["row"] == "numerics")
    assert render(PAGE.read_text(), stored | {"ceilings": {}})


def test_rows_that_do_not_fit_the_budget_are_skipped_by_name():
    session = Session(torch.device("cpu"), 1, 5.0, None, {}, command.about(torch.device("cpu")))
    command.run_rows(session, ["a"], {"accelerate-compiled": {"a"}}, 0.1)
    assert [(row["row"], row["model"]) for row in session.result["skipped"]] == [("accelerate-compiled", "a")]


def test_flops_per_token_follow_the_convention_of_the_page():
    assert [round(shape.flops_per_token / 1e9, 3) for shape in SHAPES.values()] == [0.855, 9.025, 16.842]


@pytest.mark.parametrize(("speed", "memory", "met"), [(1.01, 1.0, [True, True]), (0.99, 1.1, [False, False])])
def test_targets_of_a_row_say_whether_they_are_met(speed, memory, met):
    best = next(row for row in PAIRS if row.name == "best")
    assert [target["met"] for target in targets(best, "b", speed, memory)] == met
