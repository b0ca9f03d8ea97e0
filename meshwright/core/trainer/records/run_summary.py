"""The results of a finished run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunSummary:
    """The results of a finished run."""

    steps: int
    loss: float | None
    skipped: int
    parameters_digest: str
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """the parts of the loss and the metrics of the last step of this attempt"""
    stopped: str = ""
    """why a callback ended the run before its last step"""
