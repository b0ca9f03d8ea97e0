"""A seed decides the class and every parameter of an incident, and the seal keeps them from accidental reading."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from meshwright_practice.incidents.catalogue import CLASSES, FIXES
from meshwright_practice.incidents.incident import (
    DEFAULT_STEPS,
    MIN_STEPS,
    SEAL_FILE,
    TrainRun,
    draw_incident,
    read_seal,
    write_seal,
)
from meshwright_practice.incidents.scoring import POINTS

from meshwright.base.config import load_config
from meshwright.base.topology.unsupported import validate
from meshwright.core.faults import parse_faults
from meshwright.errors import ConfigError

SEEDS = range(60)


def test_seed_reproduces_class_and_parameters():
    for seed in SEEDS:
        assert draw_incident(seed, CLASSES) == draw_incident(seed, CLASSES)


def test_seeds_draw_every_class():
    assert {draw_incident(seed, CLASSES).kind.name for seed in range(300)} == set(CLASSES)


@pytest.mark.parametrize("name", list(CLASSES))
def test_seeds_draw_different_parameters(name):
    drawn = {str(draw_incident(seed, CLASSES, name).arrangement) for seed in SEEDS}
    assert len(drawn) >= 2


@pytest.mark.parametrize("steps", [MIN_STEPS, DEFAULT_STEPS])
@pytest.mark.parametrize("name", list(CLASSES))
def test_drawn_incident_is_consistent(name, steps):
    """Settings and faults are valid, the fault is within the job, and every text can be written."""
    for seed in SEEDS:
        incident = draw_incident(seed, CLASSES, name, steps)
        kind, arrangement = incident.kind, incident.arrangement
        for act in arrangement.acts:
            if isinstance(act, TrainRun):
                parse_faults(act.fault)
                ranks = next(setting for setting in act.settings if setting.startswith("--ranks="))
                settings = [setting for setting in act.settings if setting != ranks]
                validate(load_config(None, settings, ranks.removeprefix("--ranks=")), own_model=bool(act.part))
        if arrangement.rank is not None:
            assert 0 <= arrangement.rank < arrangement.parameters["ranks"]
        if arrangement.steps is not None:
            assert 0 <= arrangement.steps[0] <= arrangement.steps[1] < 2 * steps
            assert arrangement.steps[0] <= incident.values["step"] <= arrangement.steps[1]
        texts = [kind.page, kind.story, kind.shown_by, *kind.hints, *kind.evidence]
        texts += [text for move in kind.path for text in (move.symptom, move.interpretation, move.next_step)]
        assert all(incident.text(text) for text in texts)


@pytest.mark.parametrize("name", list(CLASSES))
def test_page_does_not_tell_class_rank_or_step(name):
    page = CLASSES[name].page
    assert name not in page.lower()
    assert {field for _, field, _, _ in string.Formatter().parse(page) if field} <= {"vocabulary"}
    assert CLASSES[name].fix in FIXES


def test_several_classes_share_a_page():
    """A page that one class alone has would tell the class to anyone who has read it once."""
    pages = [kind.page for kind in CLASSES.values()]
    assert sum(pages.count(page) > 1 for page in pages) >= 10


def test_seal_returns_the_incident_and_hides_it(tmp_path):
    for name in CLASSES:
        incident = draw_incident(5, CLASSES, name, 80)
        write_seal(tmp_path, incident)
        assert read_seal(tmp_path, CLASSES) == incident
        assert name not in (tmp_path / SEAL_FILE).read_text()


@pytest.mark.parametrize("content", ["", "x\ny\n", "e30=\n0\n", "\0" * 100, "A" * 5000])
def test_damaged_seal_is_named(content, tmp_path):
    (tmp_path / SEAL_FILE).write_text(content)
    with pytest.raises(ConfigError, match=SEAL_FILE):
        read_seal(tmp_path, CLASSES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1, CLASSES), "--seed"), ((1, CLASSES, "flood"), "--class"), ((1, CLASSES, None, 3), "--steps")],
)
def test_invalid_draw_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        draw_incident(*arguments)


def test_page_of_the_documentation_lists_every_class_and_the_points():
    page = (Path(__file__).parents[3] / "docs" / "practice-incidents.md").read_text()
    fields, classes = page.split("## Classes")
    points = re.findall(r"^\| `([a-z]+)` \| (\d+) \|", fields, re.MULTILINE)
    assert {name: int(count) for name, count in points} == POINTS
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \| (.+) \|$", classes, re.MULTILINE)
    assert {name: meaning for name, meaning, _ in rows} == {kind.name: kind.meaning for kind in CLASSES.values()}
    for name, _, shown in rows:
        cause = CLASSES[name].cause
        assert (f"`diagnose`: {cause}" in shown) == bool(cause)
