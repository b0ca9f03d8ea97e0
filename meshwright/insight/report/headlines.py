"""The three headline signals of a run in words: progress, communication and recovery. Torch-free."""

from __future__ import annotations

from meshwright.base.history.signals import ADVANCING, Signals
from meshwright.base.io import format_clock, format_count, format_percent, format_seconds
from meshwright.insight.report.document import Headline


def headlines(signals: Signals) -> list[Headline]:
    progress, communication, recovery = signals.progress, signals.communication, signals.recovery
    age = recovery.checkpoint_age_seconds
    return [
        Headline(
            "Progress",
            f"{progress.done:,} of {progress.steps:,} steps",
            [
                ("steps/s", number(progress.steps_per_second)),
                ("samples/s", number(progress.samples_per_second)),
                ("goodput", f"{number(progress.goodput)} samples/s"),
                *([("time left", format_clock(progress.eta_seconds or 0))] if signals.state in ADVANCING else []),
            ],
        ),
        Headline(
            "Exposed communication",
            f"{format_percent(communication.share)} of a step" if communication.share is not None else "not measured",
            [
                ("per step, mean of the newest steps", seconds(communication.exposed_seconds)),
                ("measured by", communication.source),
            ],
        ),
        Headline(
            "Recovery",
            f"{recovery.steps_at_risk:,} step{'' if recovery.steps_at_risk == 1 else 's'} at risk",
            [
                ("newest checkpoint", checkpoint_name(recovery.checkpoint_step)),
                ("its age", format_clock(age) if age is not None else "-"),
                ("work at risk", seconds(recovery.seconds_at_risk)),
                ("restarts", f"{recovery.restarts:,}"),
            ],
        ),
    ]


def number(value: float | None) -> str:
    return format_count(value) if value is not None else "-"


def seconds(value: float | None) -> str:
    return format_seconds(value) if value is not None else "-"


def checkpoint_name(value: int | None) -> str:
    return f"after {value:,} steps" if value is not None else "none"
