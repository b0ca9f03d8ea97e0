"""Evidence: what the product prints about a run, and whether a quotation of it shows the fault. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from meshwright.base.io import open_regular_file, printable
from meshwright.base.terminal.console import make_console
from meshwright.core.checkpoint.inspect import verify_rows
from meshwright.core.checkpoint.verify import Damage
from meshwright.errors import MeshwrightError
from meshwright.insight.diagnose.api import diagnose_folder
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.terminal.diagnosis_text import figure_cells, heading
from meshwright_practice.incidents.incident import PracticeIncident
from meshwright_practice.incidents.job import LOG_FILE, RUN_FOLDER

MAX_LINES, MAX_LINE = 4000, 4000
"""Limits of a file of records that is searched."""
MIN_LETTERS = 6
"""Shortest quotation without a number."""
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*)\s*(%|[a-zA-Z]+(?:/s)?)?")
TOLERANCE = 0.25
"""The largest relative difference of two figures that count as one: those of a live run change while one reads."""
RECORDS = ("events/rank-*.jsonl", "events/supervisor.jsonl", "attempts/*/incident.json", "attempts/*/*.log", "run.toml")


@dataclass(frozen=True)
class PrintedLine:
    """A line that a command prints, or a record that a user can read."""

    source: str
    text: str


def find_causes(folder: Path) -> list[Finding]:
    """What `meshwright diagnose` finds in the run of an incident; nothing if the run has no records."""
    with suppress(MeshwrightError, OSError):
        return diagnose_folder(folder / RUN_FOLDER).findings
    return []


def printed_lines(folder: Path, findings: list[Finding]) -> list[PrintedLine]:
    """What the commands print about the run of an incident. A run that has no records yet has none."""
    run = folder / RUN_FOLDER
    lines = [PrintedLine("diagnose", text) for text in diagnosis_lines(findings)]
    with suppress(MeshwrightError, OSError):
        rows = verify_rows(run, None)
        found = [f"{row['name']}  DAMAGED  {Damage(**damage)}" for row in rows for damage in row["damage"]]
        lines += [PrintedLine("checkpoint verify", text) for text in found]
        lines += [PrintedLine("checkpoint verify", f"{row['name']}  intact") for row in rows if not row["damage"]]
    for path in [folder / LOG_FILE, *(path for pattern in RECORDS for path in sorted(run.glob(pattern)))]:
        lines += [PrintedLine(path.name, text) for text in read_lines(path)]
    return lines


def diagnosis_lines(findings: list[Finding]) -> Iterator[str]:
    """The findings as `meshwright diagnose` prints them, without line breaks inside a sentence."""
    for finding in findings:
        yield heading(finding).plain
        yield printable(finding.sentence)
        for figure in finding.evidence:
            value, meaning = figure_cells(figure)
            yield f"{value.plain}  {meaning.plain}"
        yield from (
            printable(text) for text in (*finding.change.settings, finding.change.action, finding.check) if text
        )


def diagnosis_text(findings: list[Finding]) -> str:
    """The output of `meshwright diagnose`."""
    from meshwright.insight.terminal.diagnosis_text import show_findings

    console = make_console()
    with console.capture() as captured:
        show_findings(findings, console)
    return captured.get().rstrip()


def read_lines(path: Path) -> list[str]:
    try:
        with open_regular_file(path) as file:
            lines = islice(iter(lambda: file.readline(MAX_LINE), b""), MAX_LINES)
            return [line.decode(errors="replace").strip() for line in lines]
    except OSError:
        return []


@dataclass(frozen=True)
class EvidenceMatch:
    """What a quotation was found to be."""

    found: PrintedLine | None
    """the line that it quotes"""
    relevant: bool
    """whether that line shows the fault"""


def match_evidence(quotation: str, incident: PracticeIncident, lines: list[PrintedLine]) -> EvidenceMatch:
    """Looks up a quotation among the lines that the product prints: as text, or as figures with their units."""
    wanted = without_command(normalized(quotation))
    numbers = figures(wanted)
    if len(wanted) < MIN_LETTERS and not numbers:
        return EvidenceMatch(None, False)
    patterns = [re.compile(incident.text(pattern), re.IGNORECASE) for pattern in incident.kind.evidence]
    quoted = None
    for line in lines:
        text = normalized(line.text)
        if (len(wanted) >= MIN_LETTERS and wanted in text) or (numbers and numbers_occur(numbers, figures(text))):
            if any(pattern.search(line.text) for pattern in patterns):
                return EvidenceMatch(line, True)
            quoted = quoted or line
    return EvidenceMatch(quoted, False)


def normalized(text: str) -> str:
    return " ".join(text.lower().split())


def without_command(text: str) -> str:
    """Removes the name of the command in front of what it printed: `diagnose: 96.8 ms`."""
    return re.sub(r"^(meshwright )?(diagnose|watch|report|data show|checkpoint verify|log|events)\s*:\s*", "", text)


def figures(text: str) -> list[tuple[float, str]]:
    """The numbers with units in a text. A number without a unit is a count, of which there are too many to prove
    anything: it counts as a part of the text only.
    """
    found = [(number.replace(",", "").rstrip("."), unit) for number, unit in FIGURE.findall(text)]
    return [(float(number), unit) for number, unit in found if unit and number.count(".") < 2]


def numbers_occur(wanted: list[tuple[float, str]], found: list[tuple[float, str]]) -> bool:
    return all(
        any(unit == other_unit and abs(value - other) <= TOLERANCE * abs(other) for other, other_unit in found)
        for value, unit in wanted
    )
