"""The Prometheus alert rules, as YAML: when a person should look at a run. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str
    """PromQL over metrics of the registry"""
    wait: float
    """seconds for which the expression must hold before the alert fires"""
    severity: str
    """critical: the run does not advance, or work may be lost; warning: it is slow, or has failed before"""
    summary: str
    action: str
    """what to do next"""


ALERTS = (
    Alert(
        "MeshwrightRunStalled",
        'max by (run) (meshwright_run_state{state=~"stalled|waiting"}) == 1',
        120,
        "critical",
        "Run {{ $labels.run }} is alive and makes no progress.",
        "meshwright diagnose RUN names the rank, the step and the phase.",
    ),
    Alert(
        "MeshwrightHeartbeatStale",
        "max by (run, rank) (meshwright_heartbeat_age_seconds) > 120",
        60,
        "warning",
        "Rank {{ $labels.rank }} of run {{ $labels.run }} has made no progress for {{ $value | humanizeDuration }}.",
        "meshwright watch RUN shows where the rank is; launch.hang_timeout ends a hang.",
    ),
    Alert(
        "MeshwrightRunGone",
        "last_over_time(meshwright_eta_seconds[15m]) > 300 unless on (run) meshwright_run_alive",
        60,
        "critical",
        "Run {{ $labels.run }} is no longer exported, and its last steps were {{ $value | humanizeDuration }} away.",
        "Look for a lost host, or an exporter or job that ended; meshwright diagnose RUN tells how the run ended.",
    ),
    Alert(
        "MeshwrightCheckpointTooOld",
        "meshwright_work_at_risk_seconds > 3600 and on (run) meshwright_run_alive == 1",
        60,
        "critical",
        "A failure of run {{ $labels.run }} would lose {{ $value | humanizeDuration }} of work.",
        "Look for failed saves in meshwright watch RUN, and at checkpoint.seconds and checkpoint.overhead.",
    ),
    Alert(
        "MeshwrightCheckpointFailed",
        "increase(meshwright_checkpoint_failures_total[15m]) > 0",
        0,
        "critical",
        "A save of run {{ $labels.run }} failed.",
        "The save_failed events of the run have the reason; look at the disk first.",
    ),
    Alert(
        "MeshwrightRestarted",
        "increase(meshwright_restarts_total[15m]) > 0",
        0,
        "warning",
        "Run {{ $labels.run }} was restarted.",
        "meshwright diagnose RUN tells whether the failure will come again.",
    ),
    Alert(
        "MeshwrightExposedCommunicationHigh",
        "meshwright_exposed_communication_ratio > 0.3",
        600,
        "warning",
        "Run {{ $labels.run }} waits for communication for {{ $value | humanizePercentage }} of its step time.",
        "meshwright diagnose RUN names the collective and the change.",
    ),
    Alert(
        "MeshwrightStraggler",
        "increase(meshwright_stragglers_total[15m]) > 0",
        0,
        "warning",
        "Rank {{ $labels.rank }} of run {{ $labels.run }} is slower than the others.",
        "meshwright watch RUN shows the phase; look at the host of the rank.",
    ),
    Alert(
        "MeshwrightStepsSkipped",
        "increase(meshwright_skipped_steps_total[15m]) > 0.05 * increase(meshwright_steps_total[15m])",
        0,
        "warning",
        "Run {{ $labels.run }} skips updates: values are not finite.",
        "meshwright diagnose RUN names the first module whose output is not finite.",
    ),
    Alert(
        "MeshwrightLossScaleFalling",
        "meshwright_loss_scale < 0.1 * max_over_time(meshwright_loss_scale[1h])",
        300,
        "warning",
        "The loss scale of run {{ $labels.run }} has fallen to {{ $value }}.",
        "fp16 overflows: try precision.compute = bf16, a lower optimizer.lr, or gradient clipping.",
    ),
)
"""Every alert, those of a broken run first."""


def alert_rules(scale: float = 1.0) -> str:
    """The rule file for Prometheus. `scale` multiplies the seconds for which a condition must hold."""
    lines = ["groups:", "  - name: meshwright", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",  # a JSON string is a YAML string
            f"        for: {duration(alert.wait * scale)}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          action: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """A duration as Prometheus reads it, which has no fractions: "120s", "250ms"."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds * 1000:.0f}ms"
