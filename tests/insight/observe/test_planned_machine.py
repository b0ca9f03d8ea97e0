"""Tests of the notes of a report on plans that were made for another machine than that of the run."""

from __future__ import annotations

import pytest

from meshwright.planner.report.planned_machine import machine_notes

CPU = {"device": "cpu", "processor": "EPYC 9", "hosts": ["a", "a"]}
GPU = {"device": "NVIDIA H100 80GB HBM3", "processor": "EPYC 9", "hosts": ["a", "a", "b", "b"]}


@pytest.mark.parametrize(
    ("plan", "start", "planned_for"),
    [
        ({}, CPU, ""),
        ({"cluster": "here", "device": "EPYC 9", "host": "a"}, CPU, "EPYC 9:2x1"),
        ({"cluster": "here", "device": "NVIDIA H100 80GB HBM3", "host": "b"}, GPU, ""),
        ({"cluster": "h100:2x2", "device": "h100"}, GPU, "h100:2x2"),
        ({"cluster": None, "device": "cpu"}, CPU, ""),  # nothing was measured, and no time is predicted
        ({"cluster": "h100", "device": "h100"}, {}, "h100:8x1"),  # nothing was recorded
        ({"cluster": 3, "device": [], "host": {}}, CPU | {"hosts": 7}, "x" * 900),
    ],
)
def test_plan_for_the_machine_of_the_run_has_no_note(plan, start, planned_for):
    assert machine_notes(plan, start, planned_for) == []


@pytest.mark.parametrize(
    ("plan", "start", "planned_for", "expected"),
    [
        ({"cluster": "h100:2", "device": "h100"}, CPU, "", "for h100:2 (h100), and the run was on EPYC 9 on a"),
        ({"cluster": "here", "device": "Xeon"}, CPU, "", "another machine: for Xeon, and the run was on EPYC 9"),
        ({"cluster": "here", "device": "EPYC 9", "host": "z"}, CPU, "", "another host: on z, and the run was on a"),
        ({}, CPU, "h100:8x1", "the layout was planned for another machine: for h100:8x1"),
        ({}, GPU, "h100:8x1", "which has 1 nodes, and the run was on 2 hosts"),
        ({}, GPU, "a100:8x2", "and the run was on NVIDIA H100 80GB HBM3 on 2 hosts"),
        ({}, {"device": "cpu"}, "h100:8x1", "and the run was on cpu"),
    ],
)
def test_plan_for_another_machine_is_named(plan, start, planned_for, expected):
    [note] = machine_notes(plan, start, planned_for)
    assert expected in note
