"""Brings files from outside of docs/ that pages link to into the site: CONTRIBUTING.md as a page, examples as files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CHANGELOG.md": "changelog.md",
}
"""File in the root of the repository -> the page that it becomes."""
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=from_root((ROOT / name).read_text())))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def from_root(text: str) -> str:
    """The text of a file in the root of the repository with links as a page of docs/ has them."""
    return LINK.sub(
        lambda link: link[1].removeprefix("docs/") if link[1].startswith("docs/") else f"../{link[1]}", text
    )


def on_page_markdown(markdown: str, page: Page, **_settings: Any) -> str:
    """Points links that leave docs/ to the page or the file of the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not target.startswith("../"):
            return link[1]
        path = target.removeprefix("../")
        if path not in PAGES and not path.startswith("examples/"):
            return link[1]  # the strict build reports it
        return posixpath.relpath(PAGES.get(path, path), folder or ".")

    return LINK.sub(inside, markdown)
