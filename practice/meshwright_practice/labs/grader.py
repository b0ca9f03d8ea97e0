"""Grades a user's file: runs the checks of a lab in a forked process, and turns every way in which it may end into
checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from meshwright.base.io import format_seconds, printable, read_regular_file
from meshwright.base.records.failures import signal_name
from meshwright.errors import ConfigError, short_path
from meshwright_practice.checks import Check
from meshwright_practice.labs.isolation import IsolatedRun, Report, run_isolated
from meshwright_practice.labs.lab import FILE_CHECK, Lab
from meshwright_practice.labs.stacks import describe_line, user_line

LIMIT = 20.0
"""Seconds that a lab may take by default."""
HANG_SHARE = 0.4
"""Share of the limit after which ranks that have not returned count as hung."""
MAX_SOURCE = 1 << 20
GRADER_CHECK = "grader"
"""The name of a failed check that is the fault of the checks themselves."""


@dataclass(frozen=True)
class Grading:
    """The result of grading one file once."""

    lab: Lab
    checks: tuple[Check, ...]
    output: str = ""
    """what the user's code printed"""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        return next((check for check in self.checks if not check.passed), None)

    @property
    def not_run(self) -> tuple[str, ...]:
        """Checks that a failure before them has prevented."""
        names = {check.name for check in self.checks}
        return tuple(name for name in self.lab.all_checks if name not in names)


def read_source(path: Path) -> str:
    content = read_regular_file(path, MAX_SOURCE, str(path), "a file of a lab")
    if (position := content.find(0)) >= 0:
        raise ConfigError(f"{path} has a NUL byte at byte {position}", "expected a file of a lab, in UTF-8 text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start}", "expected a file of a lab") from None


def grade(lab: Lab, path: Path, limit: float = LIMIT) -> Grading:
    """Grades a file. Raises ConfigError if it cannot be read; everything else is a check."""
    source = read_source(path)
    absolute = path.resolve()
    warm_up()
    checks = lab.load_checks()
    run = run_isolated(partial(run_checks, lab, source, absolute, checks, HANG_SHARE * limit), limit)
    reported = [Check(**report) for report in run.reports if report.keys() == Check.__dataclass_fields__.keys()]
    ended_well = any("ended" in report for report in run.reports)
    if not ended_well and all(check.passed for check in reported):
        reported.append(explain_end(lab, run, reported, source, absolute, limit))
    return Grading(lab, tuple(map(printable_check, reported)), printable(run.output))


@cache
def warm_up() -> None:
    """Imports here, once, what every forked process would import again: torch takes seconds."""
    import meshwright_practice.labs.work  # noqa: F401
    from meshwright.core.launch.ranks import preload_optimizer

    preload_optimizer()


def run_checks(
    lab: Lab, source: str, path: Path, checks: Callable[..., None], hang_seconds: float, report: Report
) -> None:
    """Runs in the forked process."""
    import torch

    from meshwright_practice.labs.user_error import UserError
    from meshwright_practice.labs.work import GradingEnded, Work

    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # names that newer torch renames
    work = Work(lab, source, path, lambda check: report(asdict(check)), hang_seconds)
    try:
        work.load()
        checks(work)
    except GradingEnded:
        pass
    except BaseException as error:  # noqa: BLE001  a value of a kind that the checks did not expect
        found = UserError.from_exception(error, str(path))
        hint = "compare what your functions return with the signatures in the starter"
        report(asdict(Check(GRADER_CHECK, False, "the checks run", f"{found.kind}: {found.text}"[:600], hint)))
    report({"ended": True})


def explain_end(lab: Lab, run: IsolatedRun, reported: list[Check], source: str, path: Path, limit: float) -> Check:
    """The check for a process that ended before its checks did."""
    done = {check.name for check in reported}
    name = next((name for name in lab.all_checks if name not in done), FILE_CHECK)
    if run.timed_out:
        where = f"{short_path(str(path))}, {describe_line(user_line(run.stack, str(path)), source)}"
        message = "this line does not end, or is called without end; --limit SECONDS allows a slow machine more time"
        return Check(name, False, f"the checks end within {format_seconds(limit)}", f"still running: {where}", message)
    how = f"signal {-run.status} ({signal_name(-run.status)})" if run.status < 0 else f"status {run.status}"
    message = "look for os._exit, a signal, or a crash in native code: the checks call your functions and go on"
    return Check(name, False, "the functions return", f"the process ended with {how}", message)


def printable_check(check: Check) -> Check:
    return Check(check.name, check.passed, *map(printable, (check.expected, check.found, check.message)))
