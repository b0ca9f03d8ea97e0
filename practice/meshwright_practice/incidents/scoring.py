"""The score of an answer: points for what is true, less for time over par and for hints. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright_practice.incidents.answer import IncidentAnswer
from meshwright_practice.incidents.evidence import PrintedLine, match_evidence
from meshwright_practice.incidents.incident import PracticeIncident

POINTS = {"class": 40, "rank": 15, "step": 15, "fix": 15, "evidence": 15}
"""Points of each field; together 100."""
QUOTED_POINTS = 5
"""Points of evidence that the product printed, and that does not show the fault."""
HINT_COST = 10
MAX_TIME_COST = 20
TIME_SHARE = 0.1
"""Every tenth of the par time beyond it costs a point."""
MAX_EXTRA_STEPS = 10
"""How much wider than the true range an answered range of steps may be."""


@dataclass(frozen=True)
class FieldScore:
    """The points of one field of an answer."""

    field: str
    points: int
    possible: int
    answered: str
    true: str
    reason: str = ""


@dataclass(frozen=True)
class IncidentScore:
    """The score of an answer, and what it is made of."""

    fields: tuple[FieldScore, ...]
    seconds: float
    par: float
    time_cost: int
    hints: int

    @property
    def truth(self) -> int:
        return sum(field.points for field in self.fields)

    @property
    def hint_cost(self) -> int:
        return HINT_COST * self.hints

    @property
    def total(self) -> int:
        return max(0, self.truth - self.time_cost - self.hint_cost)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"truth": self.truth, "hint_cost": self.hint_cost, "total": self.total}


def score_answer(
    answer: IncidentAnswer,
    incident: PracticeIncident,
    history: RunHistory | None,
    lines: list[PrintedLine],
    seconds: float,
    hints: int,
) -> IncidentScore:
    """Compares an answer with the truth. `lines` are what the product prints about the run."""
    fields = (
        exact("class", answer.name, incident.kind.name),
        exact("rank", answer.rank, "none" if incident.arrangement.rank is None else incident.arrangement.rank),
        score_steps(answer.steps, incident.step_window(history)),
        exact("fix", answer.fix, incident.kind.fix),
        score_evidence(answer.evidence, incident, lines),
    )
    seconds = max(0.0, seconds)
    over = max(0.0, seconds - incident.kind.par) / (TIME_SHARE * incident.kind.par)
    return IncidentScore(fields, seconds, incident.kind.par, min(MAX_TIME_COST, int(over)), hints)


def exact(field: str, answered: int | str | None, true: int | str) -> FieldScore:
    points = POINTS[field] if answered == true else 0
    return FieldScore(field, points, POINTS[field], "" if answered is None else str(answered), str(true))


def score_steps(answered: tuple[int, int] | str | None, window: tuple[int, int] | None) -> FieldScore:
    true = "none" if window is None else range_text(window)
    if answered is None or isinstance(answered, str) or window is None:
        right = answered is not None and (answered == "none") == (window is None) and isinstance(answered, str)
        text = "" if answered is None else answered if isinstance(answered, str) else range_text(answered)
        return FieldScore("step", POINTS["step"] if right else 0, POINTS["step"], text, true)
    wide = answered[1] - answered[0] > window[1] - window[0] + MAX_EXTRA_STEPS
    right = answered[0] <= window[1] and answered[1] >= window[0] and not wide
    reason = "the range is too wide to say anything" if wide else ""
    return FieldScore("step", POINTS["step"] if right else 0, POINTS["step"], range_text(answered), true, reason)


def range_text(steps: tuple[int, int]) -> str:
    return str(steps[0]) if steps[0] == steps[1] else f"{steps[0]}-{steps[1]}"


def score_evidence(quotation: str | None, incident: PracticeIncident, lines: list[PrintedLine]) -> FieldScore:
    true = incident.text(incident.kind.shown_by)
    if not quotation:
        return FieldScore("evidence", 0, POINTS["evidence"], "", true, "none was given")
    match = match_evidence(quotation, incident, lines)
    if match.found is None:
        reason = "no command prints this about the run"
        return FieldScore("evidence", 0, POINTS["evidence"], quotation, true, reason)
    if not match.relevant:
        reason = f"{match.found.source} prints it, and it does not show this fault"
        return FieldScore("evidence", QUOTED_POINTS, POINTS["evidence"], quotation, true, reason)
    points = POINTS["evidence"]
    return FieldScore("evidence", points, points, quotation, true, f"{match.found.source} prints it")
