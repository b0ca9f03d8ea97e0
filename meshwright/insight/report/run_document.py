"""Builds the document of a run: verdict, headline signals, explanation, and the sections of its report. Torch-free."""

from __future__ import annotations

import time

from meshwright.base.history.signals import read_signals
from meshwright.insight.report.compared_figures import Measurements, median_of
from meshwright.insight.report.document import RunDocument
from meshwright.insight.report.headlines import headlines
from meshwright.insight.report.run_report import Report
from meshwright.insight.report.sections.account import account_section
from meshwright.insight.report.sections.certificate import certificate_section
from meshwright.insight.report.sections.curves import curves_section
from meshwright.insight.report.sections.diagnosis import diagnosis_section
from meshwright.insight.report.sections.phases import phases_section
from meshwright.insight.report.sections.recovery import recovery_section
from meshwright.insight.report.sections.rollouts import rollouts_section
from meshwright.insight.report.sections.settings import settings_section, versions_section
from meshwright.insight.report.sections.timeline import timeline_section
from meshwright.planner.report.explanation import explain_run
from meshwright.planner.report.predicted import predicted_section
from meshwright.planner.report.run_plan import config_of_run, find_run_plan
from meshwright.version import __version__

TONES = {
    "complete": "good",
    "progressing": "good",
    "stopped": "warn",
    "waiting": "warn",
    "skipping": "warn",
    "replaying": "warn",
    "restarting": "warn",
    "stalled": "bad",
    "failed": "bad",
}
"""How a state is shown; the others are neutral."""


def build_document(report: Report, now: float | None = None) -> RunDocument:
    """The document of a report; `now` is the time of the report in Unix seconds."""
    now = time.time() if now is None else now
    history, summary = report.history, summarize(report, now)
    assert history is not None
    attempt = next((each for each in reversed(history.attempts) if each.number == report.attempt), None)
    if attempt is None:
        return summary
    config, plan = config_of_run(history.config), history.plan
    run_plan = find_run_plan(config, plan, str(attempt.start.get("device", "cpu"))[:100])
    measurements = report.measurements or Measurements({}, {})
    step_seconds = median_of(measurements.steps[0].seconds) if 0 in measurements.steps else None
    timeline = timeline_section(history, attempt.number, step_seconds)
    sections = [
        explain_run(report, attempt, plan, run_plan),
        predicted_section(report),
        phases_section(measurements),
        *([timeline] if timeline is not None else []),
        *summary.sections,
        recovery_section(history, now),
        diagnosis_section(history),
        certificate_section(history.folder, config),
        settings_section(config),
        versions_section(history, attempt.start),
    ]
    return RunDocument(**{**vars(summary), "sections": sections})


def summarize(report: Report, now: float) -> RunDocument:
    """The document without the sections that need the planner: signals, verdict, curves and account."""
    history = report.history
    assert history is not None
    signals = read_signals(history, now)
    rollouts = rollouts_section(history)
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return RunDocument(
        title=f"Run {history.folder.root.resolve().name}",
        state=signals.state,
        tone=TONES.get(signals.state, "info"),
        sentence=signals.sentence,
        verdict=f"{report.verdict[0].upper()}{report.verdict[1:]}.",
        status=f"{report.status}; medians of {report.steps:,} steps" if report.steps else report.status,
        headlines=headlines(signals),
        warnings=[f"{note[0].upper()}{note[1:]}." for note in report.other_machine],
        sections=[curves_section(history), *([rollouts] if rollouts else []), account_section(history, now)],
        written=f"Written by meshwright {__version__} at {written}; ages are as of then.",
    )
