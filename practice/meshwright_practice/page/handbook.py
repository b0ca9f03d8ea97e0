"""The chapters of the handbook as HTML, rendered from Markdown without raw HTML. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.base.io import read_regular_file
from meshwright.errors import ConfigError

MAX_CHAPTER_BYTES = 1 << 20
CALCULATOR = "*The calculator is part of the documentation site.*"


@dataclass(frozen=True)
class Chapter:
    """A page of the handbook: its name in addresses, and its title."""

    name: str
    title: str
    path: Path


def handbook_folder() -> Path | None:
    """The chapters beside the package: inside it where they are shipped, or in docs/ of a checkout."""
    package = Path(str(files("meshwright")))
    folders = (package / "practice" / "handbook", package.parent / "docs" / "handbook")
    return next((folder for folder in folders if folder.is_dir()), None)


def find_chapters(folder: Path | None) -> dict[str, Chapter]:
    """The chapters by name, the index first."""
    paths = sorted(folder.glob("*.md"), key=lambda path: (path.stem != "index", path.stem)) if folder else []
    return {path.stem: Chapter(path.stem, title_of(path), path) for path in paths}


def title_of(path: Path) -> str:
    first = next((line for line in read_chapter(path).splitlines() if line.startswith("# ")), f"# {path.stem}")
    return first[2:].strip()


def read_chapter(path: Path) -> str:
    return read_regular_file(path, MAX_CHAPTER_BYTES, str(path), "a chapter of the handbook").decode(errors="replace")


def render_chapter(chapter: Chapter, chapters: dict[str, Chapter]) -> str:
    """The HTML of a chapter. Scripts are left out, and so are comments, which mark figures that the build writes; a
    calculator becomes a sentence; links to other chapters lead to this page, and links into the repository are text.
    """
    text = re.sub(r"<!--.*?-->|<script\b.*?</script>", "", read_chapter(chapter.path), flags=re.DOTALL)
    text = re.sub(r'<div class="calculator".*?</div>', CALCULATOR, text, flags=re.DOTALL)
    html: str = markdown().render(text).replace("&lt;br&gt;", "<br>")

    def link(match: re.Match[str]) -> str:
        target = match[1]
        name = re.fullmatch(r"(?:\./)?([\w-]+)\.md(?:#[\w-]*)?", target)
        if name and name[1] in chapters:
            return f'<a href="#/handbook/{name[1]}">'
        if target.startswith(("https://", "http://")):
            return f'<a href="{target}" rel="noreferrer" target="_blank">'
        return '<a class="inert">'

    return re.sub(r'<a href="([^"]*)"[^>]*>', link, html)


@cache
def markdown() -> Any:
    """The renderer: tables, and no raw HTML, so that a chapter cannot add anything to the page but text."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise ConfigError(
            "the handbook is rendered by the package markdown-it-py, which is not installed",
            "try pip install 'meshwright[practice]'",
        ) from None
    return MarkdownIt("commonmark", {"html": False}).enable("table")
