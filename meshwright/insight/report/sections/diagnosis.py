"""The most important findings of a run's diagnosis as a section of its report. Torch-free."""

from __future__ import annotations

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_seconds
from meshwright.insight.diagnose.finding import Finding, MeasuredFigure
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.report.document import Section
from meshwright.insight.terminal.diagnosis_text import format_figure

MAX_FINDINGS = 3
MAX_EVIDENCE = 4
"""Figures that are shown of a finding."""


def diagnosis_section(history: RunHistory) -> Section:
    """The section; the first finding is the most important one."""
    findings = diagnose_run(history)
    more = len(findings) - MAX_FINDINGS
    return Section(
        "Diagnosis",
        parts=[describe(finding) for finding in findings[:MAX_FINDINGS]],
        notes=[f"{more} more: meshwright diagnose RUN"] if more > 0 else [],
    )


def describe(finding: Finding) -> Section:
    title = finding.cause + (f": {finding.variant}" if finding.variant else "")
    gain = f"; {finding.share_text}" if finding.share_text else ""
    change = finding.change
    predicted = change.predicted_seconds
    verdict = finding.sentence.rstrip(".")
    sentences = [f"{verdict[:1].upper()}{verdict[1:]}{gain}. Confidence: {finding.confidence}."]
    sentences += [f"Next: {change.action.rstrip('.')}."] if change.action else []
    sentences += [f"Predicted step time after the change: {format_seconds(predicted)}."] if predicted else []
    lines = [*change.settings, *([finding.check] if finding.check else [])]
    return Section(title, sentences, list(map(evidence, finding.evidence[:MAX_EVIDENCE])), code="\n".join(lines))


def evidence(figure: MeasuredFigure) -> str:
    compared = ""
    if figure.compared is not None:
        compared = f" ({figure.compared_with or 'compared with'}: {format_figure(figure.compared, figure.unit)})"
    return f"{figure.figure}: {format_figure(figure.value, figure.unit)}{compared}"
