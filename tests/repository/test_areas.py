"""The areas of the package: the order in which they import each other, their sizes, and what importing a part reads."""

from __future__ import annotations

import pytest

from tests.repository.imports import CLOSURES, MAY_IMPORT, area, closure, forbidden_imports, lines, module_paths

MAX_LINES = {
    "base": 17_850,
    "core": 34_950,
    "planner": 16_600,
    "insight": 11_950,
    "prover": 14_350,
    "rl": 7_100,
    "ops": 4_800,
}
"""The budget of each area. An area that needs more lines takes them from another one, in this table."""

MAX_IMPORTED_LINES = {
    "the trainer's loop": 41_400,
    "the supervisor": 6_050,
    "saver and restore": 8_700,
    "the stream": 700,
    "diagnose of a trace": 2_950,
}
MAX_FORBIDDEN_IMPORTS = 86
"""Imports against the order of the areas that are left. The number only falls."""


@pytest.mark.parametrize("name", MAX_LINES)
def test_area_is_within_its_line_budget(name):
    assert lines({module for module in module_paths() if area(module) == name}) <= MAX_LINES[name]


@pytest.mark.parametrize("name", CLOSURES)
def test_import_of_a_part_reads_no_more_lines_than_its_budget(name):
    assert lines(closure(CLOSURES[name], "T")) <= MAX_IMPORTED_LINES[name]


def test_areas_import_in_their_order():
    assert len(forbidden_imports()) <= MAX_FORBIDDEN_IMPORTS


def test_every_area_has_a_budget_and_a_place_in_the_order():
    assert set(MAX_LINES) == set(MAY_IMPORT)
    assert set(MAX_IMPORTED_LINES) == set(CLOSURES)
