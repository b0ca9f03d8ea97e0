"""The story of an incident: what happened when, what `diagnose` says, the right reasoning, and the fix. Torch-free."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_seconds, write_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import MeshwrightError
from meshwright.insight.diagnose.finding import Finding
from meshwright_practice.incidents.catalogue import FIXES
from meshwright_practice.incidents.evidence import diagnosis_text
from meshwright_practice.incidents.incident import Move, PracticeIncident
from meshwright_practice.incidents.job import RUN_FOLDER, read_job
from meshwright_practice.incidents.timeline import StoryMoment, build_timeline

STORY_FILE = "story.json"
"""Beside the run folder, written when the incident is closed."""


@dataclass(frozen=True)
class Story:
    """What the user reads at the end."""

    name: str
    meaning: str
    seed: int
    rank: int | None
    steps: tuple[int, int] | None
    what_happened: str
    timeline: tuple[StoryMoment, ...]
    outcome: str
    """how the job ended"""
    findings: tuple[Finding, ...]
    diagnose_names_it: bool
    """whether a finding of `diagnose` has the cause of this class"""
    shown_by: str
    path: tuple[Move, ...]
    fix: str
    read: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tell_story(incident: PracticeIncident, folder: Path, findings: list[Finding]) -> Story:
    """Builds the story from the truth and from the records of the run, which may be missing."""
    history, job = None, read_job(folder)
    with suppress(MeshwrightError, OSError):
        history = RunHistory(RunFolder(folder / RUN_FOLDER))
    kind = incident.kind
    return Story(
        name=kind.name,
        meaning=kind.meaning,
        seed=incident.seed,
        rank=incident.arrangement.rank,
        steps=incident.step_window(history),
        what_happened=incident.text(kind.story),
        timeline=build_timeline(incident, history, job),
        outcome=job.sentence,
        findings=tuple(findings),
        diagnose_names_it=names_cause(incident, findings),
        shown_by=incident.text(kind.shown_by),
        path=tuple(
            Move(*map(incident.text, (move.symptom, move.interpretation, move.next_step))) for move in kind.path
        ),
        fix=FIXES[kind.fix],
        read=kind.read,
    )


def names_cause(incident: PracticeIncident, findings: list[Finding]) -> bool:
    """Whether `diagnose` names the cause of the class, and the rank where both name one."""
    rank = incident.arrangement.rank
    return any(
        finding.cause == incident.kind.cause and (finding.rank is None or rank is None or finding.rank == rank)
        for finding in findings
    )


def story_text(story: Story) -> str:
    """The story for the terminal."""
    window = "none" if story.steps is None else f"{story.steps[0]} to {story.steps[1]}"
    rank = "no single rank" if story.rank is None else f"rank {story.rank}"
    lines = [f"{story.name}: {story.meaning} ({rank}, step {window}; --seed {story.seed})", ""]
    lines += [story.what_happened, "", "Timeline"]
    for moment in story.timeline:
        lines.append(f"  {format_seconds(moment.seconds):>8}  {moment.text}")
    lines.append(f"            {story.outcome}")
    lines += ["", "What meshwright diagnose says"]
    lines += [f"  {line}" for line in diagnosis_text(list(story.findings)).splitlines()] or ["  nothing: no records"]
    verdict = "names the cause" if story.diagnose_names_it else "does not name the cause in these records"
    lines += ["", f"diagnose {verdict}. What shows it, once it has happened: {story.shown_by}.", "", "The right path"]
    for number, move in enumerate(story.path, 1):
        lines.append(f"  {number}. {move.symptom}")
        lines.append(f"     -> {move.interpretation}")
        lines.append(f"     -> {move.next_step}")
    lines += ["", f"Fix: {story.fix}.", f"Read: {', '.join(story.read)}"]
    return "\n".join(lines)


def save_story(story: Story, folder: Path) -> None:
    """Writes the story beside the run folder. A folder that is gone has no place for it."""
    with suppress(OSError):
        write_json(folder / STORY_FILE, story.to_json())
