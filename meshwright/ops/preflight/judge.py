"""Judges the measurements of a preflight: expected against found, per check, host and rank. Torch-free."""

from __future__ import annotations

from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.judgement.devices import judge_devices
from meshwright.ops.preflight.judgement.hosts import (
    judge_clocks,
    judge_disks,
    judge_hosts,
    judge_limits,
    judge_versions,
)
from meshwright.ops.preflight.judgement.network import judge_groups, judge_pairs, judge_reachability
from meshwright.ops.preflight.measurements import HostMeasurements
from meshwright.ops.preflight.report import PreflightReport


def judge(measurements: HostMeasurements, expected: Expectations | None = None) -> PreflightReport:
    """Returns a row per check, host and rank. Without `expected`, hosts and ranks are compared with each other only."""
    expected = expected or Expectations()
    rows = [
        *judge_hosts(measurements, expected),
        *judge_versions(measurements),
        *judge_clocks(measurements),
        *judge_disks(measurements, expected),
        *judge_devices(measurements, expected),
        *judge_reachability(measurements),
        *judge_pairs(measurements, expected),
        *judge_groups(measurements, expected),
        *judge_limits(measurements),
    ]
    remarks = list(expected.remarks)
    if measurements.not_measured:
        remarks.append(f"devices and network were not measured: {measurements.not_measured}")
    return PreflightReport(tuple(rows), measurements, tuple(remarks))
