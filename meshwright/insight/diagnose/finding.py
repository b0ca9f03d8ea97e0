"""Findings: a cause with its place, its evidence and the next move. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from meshwright.base.io import format_percent

CAUSES = {
    "healthy": "nothing limits the run that a change of its settings would improve",
    "not judged": "time goes where no class of causes looks, or the records do not show where",
    "communication": "the ranks wait for collectives: which one, on which axis, and why it is exposed",
    "bubble": "pipeline stages idle: fill and drain of the schedule, or a stage that takes longer than the others",
    "device": "the device is under-used: small kernels, a host that launches too slowly, or shapes that do not fit it",
    "data": "steps wait for their samples: loader, decode or storage",
    "rollouts": "reinforcement learning: the learner waits for rollouts, or generators wait for the learner",
    "straggler": "one rank is slower than the others, always or now and then",
    "experts": "tokens are distributed unevenly over the experts",
    "memory": "memory is allocated and freed, or pages are swapped, during steps",
    "checkpoint": "steps wait for checkpoints",
    "replay": "samples are trained again: work that was lost, or positions that were consumed twice",
    "hang": "a rank makes no progress",
    "numerics": "the loss or gradients are not finite, spike or diverge, or the loss scale falls",
    "crash": "attempts fail: deterministic, dependent on the data, or caused by the infrastructure",
}
"""Every class of causes, with its meaning. `docs/diagnose.md` describes them."""

BROKEN = ("hang", "crash", "numerics", "replay")
"""Causes of a run that is broken, in the order of their importance; they precede those of a slow one."""

LIMITING_SHARE = 0.03
"""Share of the step time that a cause must take to be reported as limiting."""
UNJUDGED_SHARE = 0.1
"""Share of the time that no class of causes explains above which a run is not judged; it is never called healthy."""
Confidence = Literal["high", "medium", "low"]
CONFIDENCE_WEIGHTS: dict[Confidence, float] = {"high": 1.0, "medium": 0.7, "low": 0.4}
"""How much of a finding's share counts when findings are put in order."""


@dataclass(frozen=True)
class MeasuredFigure:
    """One figure that supports a finding."""

    figure: str
    """what was measured, such as "seconds in fetch, rank 1" """
    value: float
    unit: str
    """as in `observe/report`: s, B, /s, share, count"""
    compared: float | None = None
    """what it is compared with, in the same unit: the other ranks, the prediction, the expected value"""
    compared_with: str = ""


@dataclass(frozen=True)
class Change:
    """A change that removes the cause."""

    settings: tuple[str, ...] = ()
    """lines of a run file, such as `data.workers = 2`; empty if no setting helps"""
    action: str = ""
    """what to do otherwise, in one sentence"""
    predicted_seconds: float | None = None
    """the predicted step time after the change"""
    predicted_by: str = ""
    """planner, or "measured share" where the planner does not model the setting or the machine was never measured"""


@dataclass(frozen=True)
class Finding:
    """A cause, the place where it acts, the evidence, and the next move."""

    cause: str
    """a key of CAUSES"""
    variant: str
    """the kind within the class, such as "late start", "fill and drain" or "loader" """
    sentence: str
    """the verdict in one sentence that names rank, step and phase where they are known"""
    share: float
    """fraction of the step time (for a crash or a hang, of the run's time) that the change can win back; of the cause
    "not judged", the fraction that is not explained"""
    confidence: Confidence
    rank: int | None = None
    step: int | None = None
    phase: str = ""
    axis: str = ""
    evidence: tuple[MeasuredFigure, ...] = ()
    change: Change = field(default_factory=Change)
    check: str = ""
    """the command that shows whether the change helped"""
    survived: bool = False
    """whether the run went on after it: a failure that was survived costs time, and is ordered by that"""

    def __post_init__(self) -> None:
        assert self.cause in CAUSES, self.cause

    @property
    def share_text(self) -> str:
        """What the share means, in words; empty if there is none."""
        meaning = "is not explained" if self.cause == "not judged" else "to win"
        return f"{format_percent(self.share)} of the time {meaning}" if self.share > 0 else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
