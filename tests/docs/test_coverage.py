"""The coverage of the handbook: all items are there, every reference exists, and the page is what its script writes."""

from __future__ import annotations

import re
import runpy

import pytest

from meshwright.base.cli.verbs import verbs
from tests.docs.document_commands import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs" / "write_coverage.py"))
HANDBOOK = ROOT / "docs" / "handbook"


@pytest.fixture(scope="module")
def items():
    return SCRIPT["read_items"]()


def test_no_item_is_missing(items):
    assert [item.number for item in items] == list(range(1, SCRIPT["ITEMS"] + 1))
    assert len({item.title for item in items}) == len(items)


def test_every_item_has_a_chapter_and_something_that_runs(items):
    assert not [item.number for item in items if not item.chapters]
    only_read = [item.number for item in items if not (item.commands or item.tests or item.cards or item.labs)]
    assert not only_read


def test_chapters_and_anchors_exist(items):
    anchors = {page.name: SCRIPT["headings"](page.name) for page in HANDBOOK.glob("*.md")}
    chapters = {chapter for item in items for chapter in item.chapters}
    missing = [chapter for chapter in chapters if (at := chapter.partition("#"))[2] and at[2] not in anchors[at[0]]]
    assert not missing


def test_commands_tests_and_labs_exist(items):
    assert not {command for item in items for command in item.commands} - set(verbs())
    assert not [test for item in items for test in item.tests if not (ROOT / test).is_file()]
    labs = {lab.id for lab in SCRIPT["all_labs"]()}
    assert not {lab for item in items for lab in item.labs} - labs


def test_cards_and_labs_name_items_and_chapters_that_exist():
    entries = [*SCRIPT["all_cards"](), *SCRIPT["all_labs"]()]
    numbers = range(1, SCRIPT["ITEMS"] + 1)
    assert not [(entry.id, number) for entry in entries for number in entry.items if number not in numbers]
    assert not [(entry.id, entry.chapter) for entry in entries if not known_chapter(entry.chapter)]


def known_chapter(chapter: str) -> bool:
    page, _, heading = chapter.partition("#")
    if not chapter:
        return True
    known = (ROOT / "docs" / page).is_file() and page.startswith("handbook/")
    return known and (not heading or heading in SCRIPT["headings"](page.removeprefix("handbook/")))


def test_coverage_page_is_what_its_script_writes():
    """If this fails, run `python docs/write_coverage.py`."""
    text = (HANDBOOK / "coverage.md").read_text()
    assert text == SCRIPT["coverage"]()
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == list(
        range(1, SCRIPT["ITEMS"] + 1)
    )


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("1F1B and GPipe: the same bubble, different memory", "1f1b-and-gpipe-the-same-bubble-different-memory"),
        ('"Why not just increase the batch size?"', "why-not-just-increase-the-batch-size"),
        ("Backward, in the convention of `nn.Linear`", "backward-in-the-convention-of-nnlinear"),
    ],
)
def test_anchors_are_those_of_the_site(title, anchor):
    assert SCRIPT["anchor"](title) == anchor
