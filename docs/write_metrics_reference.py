"""Writes the tables of docs/metrics.md from the registry of metrics and the alert rules."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.insight.metrics.alerts import ALERTS
from meshwright.insight.metrics.registry import METRICS, SECTIONS

PAGE = Path(__file__).parent / "metrics.md"
METRICS_MARK, ALERTS_MARK, END_MARK = "<!-- metrics -->\n", "<!-- alerts -->\n", "<!-- end -->\n"


def metric_tables() -> str:
    """The metrics, one table per section of the dashboard."""
    parts = []
    for section in SECTIONS:
        rows = [metric for metric in METRICS if metric.section == section]
        lines = [
            f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |"
            for row in rows
        ]
        parts.append("\n".join([f"### {section.capitalize()}", "", "| metric | kind | labels | meaning |"]))
        parts[-1] += "\n" + "\n".join(["|---|---|---|---|", *lines, ""])
    return "\n" + "\n".join(parts) + "\n"


def alert_table() -> str:
    """The alerts with their conditions."""
    lines = [
        f"| `{alert.name}` | {alert.severity} | `{alert.expression.replace('|', chr(92) + '|')}` for {alert.wait} s |"
        for alert in ALERTS
    ]
    return "\n" + "\n".join(["| alert | severity | condition |", "|---|---|---|", *lines, ""]) + "\n"


def metrics_reference(page: str) -> str:
    """Returns the text of docs/metrics.md with the tables replaced."""
    for mark, table in ((METRICS_MARK, metric_tables()), (ALERTS_MARK, alert_table())):
        before, _, rest = page.partition(mark)
        page = before + mark + table + END_MARK + rest.partition(END_MARK)[2]
    return page


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(metrics_reference(PAGE.read_text()))
