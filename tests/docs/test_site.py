"""The documentation site: figures are those of the planner, and references those of the code."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.document_commands import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "hooks"))

import figures  # noqa: E402
import own_assets  # noqa: E402

from meshwright.base.config.reference import describe_config  # noqa: E402

HANDBOOK = sorted((DOCS / "handbook").glob("*.md"))
QUANTITY = re.compile(
    r"(?<![\w.:-])\d[\d,]*(\.\d+)?\s?(%|[KMGT]i?B\b|ms\b|µs\b|GB/s|TFLOP)|(?<![\w.:/-])\d+\.\d+(?![\w.])"
)
"""A percentage, an amount with a unit, or a decimal number: what a reader takes for a result."""


def without_figures(markdown: str) -> str:
    """A page without its figures, code, addresses and numbers of papers."""
    text = figures.MARKER.sub("", markdown)
    text = re.sub(r"```.*?```|`[^`\n]*`|<script.*?</script>", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|arXiv:\d+\.\d+", "", text)


def pages_with_figures() -> list[Path]:
    return [path for path in sorted(DOCS.rglob("*.md")) if figures.MARKER.search(path.read_text())]


SEARCHES = ("playbook", "index")
"""Pages whose figures search for a plan; `make docs` computes them as well."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path.stem in SEARCHES)) for path in pages_with_figures()],
    ids=lambda path: path.stem,
)
def test_figures_of_a_page_are_what_their_commands_print(path):
    """If this fails, run `python docs/write_figures.py`."""
    text = path.read_text()
    assert figures.with_figures(text) == text


@pytest.mark.parametrize("path", HANDBOOK, ids=lambda path: path.stem)
def test_every_number_of_the_handbook_is_a_figure(path):
    text = without_figures(path.read_text())
    assert not [match[0] for match in QUANTITY.finditer(text)]


@pytest.mark.parametrize("folder", ["handbook", "tutorials"])
def test_settings_that_pages_name_exist(folder):
    sections = {section.name: {key.key for key in section.keys} for section in describe_config()}
    named = {
        (path.name, name)
        for path in (DOCS / folder).glob("*.md")
        for name in re.findall(
            r"(?<![\w./-])([a-z_]+\.[a-z_]+)\b(?!\()", " ".join(re.findall(r"`[^`\n]+`", path.read_text()))
        )
        if name.partition(".")[0] in sections
    }
    assert named or folder == "tutorials"  # their settings are in commands, which are parsed
    assert not [(page, name) for page, name in named if name not in sections[name.partition(".")[0]]]


def test_a_figure_that_fails_is_an_error():
    with pytest.raises(figures.FigureError, match="unknown collective"):
        figures.with_figures('<!-- call: wire("none", 4) -->1<!-- end -->')
    with pytest.raises(figures.FigureError, match="is not a call"):
        figures.with_figures('<!-- call: __import__("os") -->1<!-- end -->')
    with pytest.raises(figures.FigureError, match="KeyError"):
        figures.with_figures("<!-- run: meshwright plan schedule 1f1b --json => absent -->1<!-- end -->")


def test_figures_need_no_torch():
    assert len(figures.FORMULAS) > 20
    source = "".join(path.read_text() for path in (DOCS / "hooks").glob("*.py"))
    assert not re.search(r"^\s*(import|from) torch\b", source, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "function", "page"),
    [
        ("write_command_reference.py", "command_reference", "commands.md"),
        ("write_api_reference.py", "api_reference", "api.md"),
    ],
)
def test_reference_page_is_what_its_script_writes(script, function, page):
    """If this fails, run `python docs/SCRIPT`."""
    assert (DOCS / page).read_text() == runpy.run_path(str(DOCS / script))[function]()


def test_external_assets_are_found():
    assert own_assets.external_assets('<script src="https://cdn.example/x.js"></script>') == [
        "https://cdn.example/x.js"
    ]
    assert own_assets.external_assets('<link rel="stylesheet" href="//fonts.example/a.css">') == [
        "//fonts.example/a.css"
    ]
    assert not own_assets.external_assets('<a href="https://example.org">x</a><script src="../a.js"></script>')
