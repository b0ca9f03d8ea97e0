"""Makes the Grafana dashboard from the registry: the headline signals, then the details in causal order. Torch-free."""

from __future__ import annotations

from typing import Any

from meshwright.insight.metrics.metric import Metric
from meshwright.insight.metrics.registry import METRICS, SECTIONS

HEADLINES = (
    ("State", "meshwright_run_state$filter == 1", "", "{{run}}: {{state}}"),
    ("Steps per second", "meshwright_steps_per_second$filter", "", ""),
    ("Productive share", "meshwright_goodput_ratio$filter", "ratio", ""),
    ("Time left", "meshwright_eta_seconds$filter", "seconds", ""),
    ("Exposed communication", "meshwright_exposed_communication_ratio$filter", "ratio", ""),
    ("Age of the checkpoint", "meshwright_checkpoint_age_seconds$filter", "seconds", ""),
    ("Steps at risk", "meshwright_steps_at_risk$filter", "", ""),
    ("Restarts", "meshwright_restarts_total$filter", "", ""),
)
"""(title, expression, unit, legend) of the first row: progress, communication, and recovery posture."""
STACKED = ("meshwright_phase_seconds_total", "meshwright_goodput_part_seconds", "meshwright_memory_at_peak_bytes")
NOT_SHOWN = ("meshwright_run_info", "meshwright_run_state")
"""Metrics that have no chart: labels, and the state, which the first row shows."""
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
RATE_UNITS = {"seconds": "percentunit", "bytes": "Bps"}
WIDTH, CHART_WIDTH, CHART_HEIGHT, HEADLINE_HEIGHT = 24, 8, 7, 4
DATA_SOURCE = {"type": "prometheus", "uid": "$datasource"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = [row_panel("Signals", 0)]
    width, top = WIDTH // len(HEADLINES), 1
    for index, (title, query, unit, legend) in enumerate(HEADLINES):
        place = {"x": index * width, "y": top, "w": width, "h": HEADLINE_HEIGHT}
        panels.append(panel("stat", title, "", query, UNITS.get(unit, "short"), legend or "{{run}}", place))
    top += HEADLINE_HEIGHT
    for section in SECTIONS:
        panels.append(row_panel(section.capitalize(), top))
        top += 1
        shown = [metric for metric in METRICS if metric.section == section and metric.name not in NOT_SHOWN]
        for index, metric in enumerate(shown):
            line, column = divmod(index, WIDTH // CHART_WIDTH)
            place = {"x": column * CHART_WIDTH, "y": top + line * CHART_HEIGHT, "w": CHART_WIDTH, "h": CHART_HEIGHT}
            panels.append(chart(metric, place))
        top += -(-len(shown) // (WIDTH // CHART_WIDTH)) * CHART_HEIGHT
    return {
        "title": "Meshwright",
        "uid": "meshwright",
        "tags": ["meshwright"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "panels": [numbered | {"id": number} for number, numbered in enumerate(panels, 1)],
    }


def variables() -> list[dict[str, Any]]:
    """The data source and the runs that the user selects."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": DATA_SOURCE,
            "query": {"query": "label_values(meshwright_run_info, run)", "refId": "run"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def row_panel(title: str, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def chart(metric: Metric, place: dict[str, int]) -> dict[str, Any]:
    """The chart of a metric over time."""
    title = metric.name.removeprefix("meshwright_").removesuffix("_total").replace("_", " ").capitalize()
    units = RATE_UNITS if metric.kind == "counter" else UNITS
    grouped = metric.query.partition("by (")[2].partition(")")[0]  # an aggregate has only the labels of its groups
    labels = grouped.split(", ") if grouped else ["run", *metric.labels]
    legend = " ".join(f"{{{{{label}}}}}" for label in labels if label != "le")
    made = panel("timeseries", title, metric.help, metric.query, units.get(metric.unit, "short"), legend, place)
    if metric.name in STACKED:
        made["fieldConfig"]["defaults"]["custom"] = {"fillOpacity": 60, "stacking": {"mode": "normal"}}
    return made


def panel(
    kind: str, title: str, description: str, query: str, unit: str, legend: str, place: dict[str, int]
) -> dict[str, Any]:
    """A panel with one query."""
    expression = query.replace("$filter", '{run=~"$run"}').replace("$window", "$__rate_interval")
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": DATA_SOURCE, "expr": expression, "legendFormat": legend}],
    }
