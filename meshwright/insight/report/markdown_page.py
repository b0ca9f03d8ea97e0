"""Renders the report of a run as Markdown: the figures of the page, without its pictures. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from meshwright.base.io import printable
from meshwright.insight.report.document import RunDocument, Section, Table

SPECIAL = re.compile(r"([\\`*\[\]|])")
BLOCK_START = re.compile(r"^([0-9]{0,9})([#=+.)-])(?=[\s#=-]|$)")
"""What would start a heading, a list or a line at the start of a paragraph."""


def render_markdown(document: RunDocument) -> str:
    """Returns the text of the file; records cannot add markup or HTML to it."""
    return "\n\n".join(blocks(document)) + "\n"


def blocks(document: RunDocument) -> Iterator[str]:
    yield f"# {escape(document.title)}"
    yield f"**{escape(document.state)}**: {escape(document.sentence)}"
    yield paragraph(document.verdict)
    yield paragraph(f"{document.status}. {document.written}")
    for warning in document.warnings:
        yield f"> **Note:** {escape(warning)}"
    rows = [[headline.name, headline.figure, facts(headline.facts)] for headline in document.headlines]
    yield markdown_table(Table(("signal", "", "figures"), rows, (0, 1, 2)))
    for section in document.sections:
        yield from section_blocks(section, 2)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)


def section_blocks(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escape(section.title)}"
    yield from map(paragraph, section.sentences)
    if section.items:
        yield "\n".join(f"- {paragraph(item)}" for item in section.items)
    yield from map(markdown_table, section.tables)
    if section.code:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", section.code)), default=0))
        yield f"{fence}\n{printable(section.code)}\n{fence}"
    yield from (f"*{escape(note)}*" for note in section.notes)
    for part in section.parts:
        yield from section_blocks(part, level + 1)


def markdown_table(table: Table) -> str:
    columns = range(len(table.headings))
    lines: list[Iterable[str]] = [map(escape, table.headings), (alignment(table, column) for column in columns)]
    for index, row in enumerate(table.rows):
        cells = [escape(cell) or " " for cell in row]
        marked = index in table.marked_rows
        lines.append([f"**{cell}**" if marked and cell.strip() else cell for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def alignment(table: Table, column: int) -> str:
    return ":---" if column in table.text_columns else "---:"


def paragraph(text: str) -> str:
    """A paragraph of plain text in Markdown."""
    return BLOCK_START.sub(r"\1\\\2", escape(text))


def escape(text: str) -> str:
    """One line of plain text inside a paragraph or a table."""
    line = SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
