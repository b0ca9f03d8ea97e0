"""The Grafana dashboard and the alert rules refer only to metrics of the registry, and are valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from meshwright.base.cli import main
from meshwright.insight.metrics.alerts import ALERTS, alert_rules, duration
from meshwright.insight.metrics.dashboard import NOT_SHOWN, dashboard
from meshwright.insight.metrics.registry import METRICS, SECTIONS, metric_names

PROMTOOL = shutil.which("promtool")


def named_metrics(expression: str) -> set[str]:
    return set(re.findall(r"\bmeshwright_\w+", expression))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool of Debian's package prometheus is not installed")
@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_promtool_accepts_the_alert_rules(tmp_path, scale):
    rules = tmp_path / "meshwright.yml"
    rules.write_text(alert_rules(scale))
    checked = subprocess.run([PROMTOOL, "check", "rules", rules], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_alerts_refer_to_metrics_of_the_registry():
    for alert in ALERTS:
        assert named_metrics(alert.expression)
        assert named_metrics(alert.expression) <= metric_names()
        assert alert.severity in ("critical", "warning")


def test_alert_labels_exist_in_the_expression():
    """A label that the expression drops would be empty in the message."""
    rows = {row.name: row for row in METRICS}
    for alert in ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert.summary))
        grouped = re.search(r"by \(([\w, ]+)\)", alert.expression)
        first = min(named_metrics(alert.expression), key=alert.expression.index)
        available = set(grouped[1].split(", ")) if grouped else {"run", *rows[first].labels}
        assert used <= available


def test_durations_have_no_fractions():
    assert [duration(seconds) for seconds in (0, 120, 0.25)] == ["0s", "120s", "250ms"]


def test_dashboard_panels_refer_to_metrics_of_the_registry():
    shown: set[str] = set()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            assert "$filter" not in target["expr"]
            assert named_metrics(target["expr"])
            shown |= named_metrics(target["expr"])
    assert shown <= metric_names()
    names = {"meshwright_step_seconds_bucket" if row.kind == "histogram" else row.name for row in METRICS}
    assert shown >= names - set(NOT_SHOWN)


def test_dashboard_begins_with_the_signals_and_has_its_sections_in_causal_order():
    panels = dashboard()["panels"]
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Signals", *(section.capitalize() for section in SECTIONS)]
    titles = [panel["title"] for panel in panels[1 : panels.index(next(p for p in panels[1:] if p["type"] == "row"))]]
    assert titles[:2] == ["State", "Steps per second"]
    assert {"Exposed communication", "Age of the checkpoint", "Restarts"} < set(titles)


def test_dashboard_panels_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells
        assert all(column < 24 for column, _ in covered)
        cells |= covered


def test_verbs_print_or_write_dashboard_and_rules(tmp_path, capsys):
    main(["metrics", "dashboard"])
    assert json.loads(capsys.readouterr().out) == dashboard()
    main(["metrics", "alerts"])
    assert capsys.readouterr().out == alert_rules()
    main(["metrics", "alerts", "--out", str(tmp_path / "rules.yml")])
    assert (tmp_path / "rules.yml").read_text() == alert_rules()
