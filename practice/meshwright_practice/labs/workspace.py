"""The files and the progress of a user in labs: one file per lab in a folder, and one record per lab. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.base.io import atomic_write
from meshwright.errors import ConfigError
from meshwright_practice.labs.grader import Grading
from meshwright_practice.labs.lab import Lab
from meshwright_practice.labs.registry import all_labs
from meshwright_practice.progress import PracticeProgress, load_progress, progress_file, update_progress

FOLDER = Path("practice")


@dataclass(frozen=True)
class LabRecord:
    """The progress of a user in one lab; the checks are those of the last attempt."""

    passed: bool = False
    """whether any attempt has passed"""
    attempts: int = 0
    checks_passed: int = 0
    checks: int = 0
    hints: int = 0
    """hints that were shown"""

    @classmethod
    def parse(cls, value: Any) -> LabRecord:
        """Reads a record of the progress file; what is not of its kind counts as nothing."""
        fields = value if isinstance(value, dict) else {}
        numbers = {
            name: fields.get(name, 0)
            for name in ("attempts", "checks_passed", "checks", "hints")
            if isinstance(fields.get(name), int) and not isinstance(fields.get(name), bool) and fields[name] >= 0
        }
        return cls(passed=fields.get("passed") is True, **numbers)

    def describe(self) -> str:
        if self.passed:
            return f"passed in {self.attempts} attempt{'s' if self.attempts != 1 else ''}"
        return f"{self.checks_passed} of {self.checks} checks" if self.attempts else "not started"


class Workspace:
    """The user's folder of labs. `report` receives a sentence if the progress file was damaged."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder = folder
        self._report = report

    def file(self, lab: Lab) -> Path:
        return self.folder / f"{lab.id}{lab.suffix}"

    def open(self, lab: Lab) -> tuple[Path, bool]:
        """Returns the user's file, and whether it was copied from the starter just now."""
        path = self.file(lab)
        if path.exists():
            return path, False
        self._write(path, lab.starter())
        return path, True

    def reset(self, lab: Lab) -> tuple[Path, Path | None]:
        """Copies the starter again. Returns the file, and the copy of what it was."""
        path, backup = self.file(lab), None
        if path.exists():
            backup = free_name(path)
            path.rename(backup)
        self._write(path, lab.starter())
        return path, backup

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text)
        except OSError as error:
            hint = "try --folder DIR with a folder that is writable"
            raise ConfigError(f"{path} cannot be written: {error.strerror}", hint) from None

    def progress(self) -> PracticeProgress:
        return load_progress(progress_file(), self._report)

    def lab_record(self, lab: Lab) -> LabRecord:
        return LabRecord.parse(self.progress().labs.get(lab.id))

    def add_attempt(self, grading: Grading) -> LabRecord:
        """Adds one graded attempt to the progress."""
        return self._update(
            grading.lab,
            lambda before: LabRecord(
                passed=before.passed or grading.passed,
                attempts=before.attempts + 1,
                checks_passed=sum(check.passed for check in grading.checks),
                checks=len(grading.lab.all_checks),
                hints=before.hints,
            ),
        )

    def next_hint(self, lab: Lab) -> tuple[int, str]:
        """The number of the next hint and its text. After the last one, the last one again."""
        record = self._update(lab, lambda before: replace(before, hints=min(before.hints + 1, len(lab.hints))))
        return record.hints, lab.hints[record.hints - 1]

    def _update(self, lab: Lab, change: Callable[[LabRecord], LabRecord]) -> LabRecord:
        """Changes the record of a lab while no other process writes the progress file."""

        def apply(progress: PracticeProgress) -> None:
            progress.labs[lab.id] = asdict(change(LabRecord.parse(progress.labs.get(lab.id))))

        try:
            progress = update_progress(progress_file(), apply, self._report)
            return LabRecord.parse(progress.labs[lab.id])
        except OSError as error:
            hint = "try MESHWRIGHT_HOME with a folder that is writable"
            raise ConfigError(f"{progress_file()} cannot be written: {error.strerror}", hint) from None

    def records(self) -> list[tuple[Lab, LabRecord]]:
        labs = self.progress().labs
        return [(lab, LabRecord.parse(labs.get(lab.id))) for lab in all_labs()]

    def next_lab(self, after: Lab | None = None) -> Lab | None:
        """The first lab after this one, in a circle, that has not passed."""
        records = self.records()
        start = next((index + 1 for index, (lab, _) in enumerate(records) if after and lab.id == after.id), 0)
        open_labs = (lab for lab, record in records[start:] + records[:start] if not record.passed)
        return next((lab for lab in open_labs if after is None or lab.id != after.id), None)


def free_name(path: Path) -> Path:
    """The first free name `lab.py.backup-N`."""
    number = 1
    while (backup := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    return backup
