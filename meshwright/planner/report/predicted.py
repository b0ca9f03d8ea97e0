"""Every measured figure next to its prediction, as a section of the report. Torch-free."""

from __future__ import annotations

from meshwright.base.io import format_percent
from meshwright.insight.report.document import Section, Table
from meshwright.insight.report.report_text import DIFFERENT, UNITS, communication_groups
from meshwright.insight.report.run_report import Report


def predicted_section(report: Report) -> Section:
    """Every measured figure next to its prediction, and the collectives of all ranks."""
    rows = []
    for row in report.rows:
        form = UNITS[row.unit]
        rows.append(
            [
                row.section,
                row.figure,
                form(row.measured) if row.measured is not None else "not measured",
                form(row.predicted) if row.predicted is not None else "-",
                format_percent(row.error, 1, signed=True),
                row.note,
            ]
        )
    tables = [Table(("", "figure", "measured", "predicted", "error", "note"), rows, (0, 1, 5))] if rows else []
    groups = communication_groups(report.communication)
    if groups:
        marked = [index for index, row in enumerate(groups) if row[4] == DIFFERENT]
        headings = ("axis", "collective", "message bytes", "predicted", "", "ranks")
        tables.append(Table(headings, groups, (0, 1, 4, 5), marked))
    return Section("Predicted and measured", tables=tables, notes=report.notes)
