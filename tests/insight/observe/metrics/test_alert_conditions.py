"""Every alert fires on the series of the problem that it is for, and none fires on those of a healthy run."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from meshwright.insight.metrics.alerts import ALERTS, alert_rules

PROMTOOL = shutil.which("promtool")
MINUTES = 30
HEALTHY = {
    'meshwright_run_state{run="a",state="progressing"}': "1x30",
    'meshwright_run_state{run="a",state="stalled"}': "0x30",
    'meshwright_run_state{run="a",state="waiting"}': "0x30",
    'meshwright_run_alive{run="a"}': "1x30",
    'meshwright_eta_seconds{run="a"}': "9000-60x30",
    'meshwright_heartbeat_age_seconds{run="a",rank="0"}': "0.2x30",
    'meshwright_heartbeat_age_seconds{run="a",rank="1"}': "0.2x30",
    'meshwright_work_at_risk_seconds{run="a"}': "30x30",
    'meshwright_checkpoint_failures_total{run="a"}': "0x30",
    'meshwright_restarts_total{run="a"}': "3x30",
    'meshwright_exposed_communication_ratio{run="a"}': "0.1x30",
    'meshwright_stragglers_total{run="a",rank="1"}': "1x30",
    'meshwright_steps_total{run="a"}': "0+100x30",
    'meshwright_skipped_steps_total{run="a"}': "0+1x30",
    'meshwright_loss_scale{run="a"}': "65536x30",
}
"""Series of 30 minutes with a sample per minute: value, change per minute, and number of samples."""
PROBLEMS = {
    "MeshwrightRunStalled": {'meshwright_run_state{run="a",state="waiting"}': "0x10 1x20"},
    "MeshwrightHeartbeatStale": {'meshwright_heartbeat_age_seconds{run="a",rank="1"}': "0+60x30"},
    "MeshwrightRunGone": {name: values.replace("x30", "x20") for name, values in HEALTHY.items()},
    "MeshwrightCheckpointTooOld": {'meshwright_work_at_risk_seconds{run="a"}': "3000+60x30"},
    "MeshwrightCheckpointFailed": {'meshwright_checkpoint_failures_total{run="a"}': "0x20 1x10"},
    "MeshwrightRestarted": {'meshwright_restarts_total{run="a"}': "3x20 4x10"},
    "MeshwrightExposedCommunicationHigh": {'meshwright_exposed_communication_ratio{run="a"}': "0.5x30"},
    "MeshwrightStraggler": {'meshwright_stragglers_total{run="a",rank="1"}': "1x20 2x10"},
    "MeshwrightStepsSkipped": {'meshwright_skipped_steps_total{run="a"}': "0+50x30"},
    "MeshwrightLossScaleFalling": {'meshwright_loss_scale{run="a"}': "65536x15 1024x15"},
}
LABELS = {"MeshwrightHeartbeatStale": {"rank": "1"}, "MeshwrightStraggler": {"rank": "1"}}


def values(text: str) -> str:
    """The notation of promtool, in which axN repeats a after its first sample."""
    parts = [part.split("x") for part in text.split()]
    return " ".join(
        f"{start if '+' in start[1:] or '-' in start[1:] else f'{start}+0'}x{count}" for start, count in parts
    )


def expect_no_alert(tmp_path, series: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs promtool on series, with the expectation that no alert fires at their end."""
    (tmp_path / "meshwright.yml").write_text(alert_rules())
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values(text)} for name, text in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": alert.name, "exp_alerts": []} for alert in ALERTS
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": ["meshwright.yml"], "evaluation_interval": "1m", "tests": [test]}))
    return subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool of Debian's package prometheus is not installed")
def test_no_alert_fires_on_a_healthy_run(tmp_path):
    result = expect_no_alert(tmp_path, HEALTHY)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool of Debian's package prometheus is not installed")
@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_alert_fires_on_its_problem(tmp_path, name):
    series = PROBLEMS[name] if name == "MeshwrightRunGone" else HEALTHY | PROBLEMS[name]
    result = expect_no_alert(tmp_path, series)
    output = result.stdout + result.stderr
    assert result.returncode == 1
    names = {alert.name for alert in ALERTS if f"alertname: {alert.name}," in output}
    assert names == {name}, output
    labels = {"run": "a", **LABELS.get(name, {})}
    assert all(f'{key}="{value}"' in output for key, value in labels.items()), output
