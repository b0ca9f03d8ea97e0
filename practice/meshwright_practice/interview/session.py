"""The state of one interview: its clock, its answers and its gates, in the progress file and in a file of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.io import meshwright_home, read_json, write_json
from meshwright.errors import ConfigError
from meshwright_practice.interview.exercise import CLARIFICATIONS, GATES, STAGES, InterviewStage
from meshwright_practice.interview.grade import GateResult
from meshwright_practice.progress import PracticeProgress

FOLDER = "interviews"
EXPECTED = "a session that meshwright practice interview wrote"


@dataclass
class InterviewSession:
    """One interview. Seconds before the last pause are in `elapsed`; the time since `running_since` comes on top."""

    id: str
    file: str
    options: dict[str, str]
    answered: bool
    elapsed: float = 0.0
    running_since: float | None = None
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """gate -> minute at which it was checked last, whether it passed, and the names of the checks that did not"""
    finished: bool = False

    def minutes(self, now: float) -> float:
        running = now - self.running_since if self.running_since is not None else 0.0
        return (self.elapsed + max(0.0, running)) / 60

    def pause(self, now: float) -> None:
        self.elapsed, self.running_since = 60 * self.minutes(now), None

    def record(self, result: GateResult, now: float) -> None:
        failed = [check.name for check in result.checks if not check.passed]
        minute = round(self.minutes(now), 1)
        self.gates[str(result.stage.gate)] = {
            "minute": minute,
            "passed": result.passed,
            "in_time": result.passed and minute <= result.stage.gate,
            "failed": [*failed, *result.not_checked],
        }

    def next_stage(self) -> InterviewStage | None:
        """The first stage whose gate has not passed."""
        return next((stage for stage in STAGES if not self.gates.get(str(stage.gate), {}).get("passed")), None)


def new_session(file: Path, options: Mapping[str, str], answered: bool, now: float) -> InterviewSession:
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return InterviewSession(name, str(file.resolve()), dict(options), answered, 0.0, now)


def session_file(name: str) -> Path:
    return meshwright_home() / FOLDER / f"{name}.json"


def save_session(session: InterviewSession, progress: PracticeProgress) -> None:
    """Writes the session's own file, and its summary into the progress, which the caller saves."""
    path = session_file(session.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(session))
    progress.interviews[session.id] = {
        "file": session.file,
        "minutes": round(session.elapsed / 60, 1),
        "gates": {gate: value["passed"] for gate, value in session.gates.items()},
        "finished": session.finished,
    }


def resume_session(progress: PracticeProgress) -> InterviewSession:
    """The newest interview that is not finished; raises ConfigError if there is none."""
    open_ones = sorted(
        name for name, value in progress.interviews.items() if isinstance(value, dict) and not value.get("finished")
    )
    if not open_ones:
        raise ConfigError("there is no interview to resume", "try meshwright practice interview --file FILE")
    name = open_ones[-1]
    if Path(name).name != name:
        raise ConfigError(f"the progress names an interview {name[:40]!r}", f"expected {EXPECTED}")
    return parse_session(read_json(session_file(name), EXPECTED), name)


def parse_session(value: Any, name: str) -> InterviewSession:
    """Parses the file of a session, which may be damaged."""
    error = ConfigError(f"{session_file(name)} is damaged", f"expected {EXPECTED}")
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("options"), dict)
        or not isinstance(value.get("gates"), dict)
    ):
        raise error
    options = validated_options(value["options"])
    gates = {gate: row for gate, row in value["gates"].items() if gate in map(str, GATES) and isinstance(row, dict)}
    elapsed, file = value.get("elapsed"), value.get("file")
    if not isinstance(elapsed, int | float) or not 0 <= elapsed < 1e9 or not isinstance(file, str):
        raise error
    return InterviewSession(name, file, options, bool(value.get("answered")), float(elapsed), None, gates)


def validated_options(given: Mapping[str, Any]) -> dict[str, str]:
    """One answer per clarifying question; the first is the default."""
    chosen = {}
    for each in CLARIFICATIONS:
        answer = given.get(each.option, next(iter(each.answers)))
        if answer not in each.answers:
            raise ConfigError(f"{each.option} = {str(answer)[:40]}", f"expected {' or '.join(each.answers)}")
        chosen[each.option] = str(answer)
    return chosen


def parse_assumptions(words: tuple[str, ...]) -> dict[str, str]:
    """The options that answers such as "cpu" and "elastic" set."""
    given = {}
    for word in words:
        option = next((each.option for each in CLARIFICATIONS if word in each.answers), None)
        if option is None:
            known = ", ".join(answer for each in CLARIFICATIONS for answer in each.answers)
            raise ConfigError(f"--assume {word[:40]} is not an answer", f"expected some of {known}")
        given[option] = word
    return validated_options(given)
