"""What pages, sources and practice point to exists: files, cards, and sections of the handbook."""

from __future__ import annotations

import re
import runpy
import subprocess

import pytest
from meshwright_practice.cards.registry import all_cards
from meshwright_practice.incidents.catalogue import CLASSES
from meshwright_practice.interview.follow_ups import FOLLOW_UPS

from tests.docs.document_commands import ROOT

HEADINGS = runpy.run_path(str(ROOT / "docs" / "write_coverage.py"))["headings"]
FOLDERS = ("meshwright", "practice", "tests", "docs", "examples", "benchmarks", "fuzz")
NOT_OURS = ("transformers/", "docs/performance.md", "practice/interview.py", "practice/ring_all_reduce.py")
"""Files of other repositories, and of a user's workspace."""


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


@pytest.mark.parametrize("page", tracked("docs/*.md", "README.md"))
def test_source_files_that_a_page_names_exist(page):
    """Paths are those of the repository, or begin inside of `meshwright/` or `tests/`."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / page).read_text())
    folders = [ROOT, ROOT / "meshwright", ROOT / "tests"]
    missing = {path for path in named if not any((folder / path).is_file() for folder in folders)}
    assert not [path for path in missing if not path.startswith(NOT_OURS)]


def test_files_that_sources_name_exist():
    pattern = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w/-]+\.(?:py|md|toml))\b")
    missing = {
        (source, path)
        for source in tracked("*.py", "Makefile", "*.toml", "*.yml")
        if not source.startswith("tests/")  # tests name files that they write
        for path in pattern.findall((ROOT / source).read_text())
        if not (ROOT / path).is_file() and not path.startswith(NOT_OURS)
    }
    assert not missing


@pytest.mark.parametrize("incident", CLASSES.values(), ids=list(CLASSES))
def test_cards_and_sections_that_an_incident_names_exist(incident):
    cards = [pointer.removeprefix("card ") for pointer in incident.read if pointer.startswith("card ")]
    sections = [pointer.removeprefix("handbook/") for pointer in incident.read if pointer.startswith("handbook/")]
    assert cards
    assert sections
    assert len(cards) + len(sections) == len(incident.read)
    assert not set(cards) - set(all_cards())
    for page, _, heading in (section.partition("#") for section in sections):
        assert heading in HEADINGS(page)


def test_pages_that_questions_of_the_interview_name_exist():
    assert not {question.page for question in FOLLOW_UPS.values() if not (ROOT / question.page).exists()}
