"""Says where a prediction or a layout was made for another machine than the run was on. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.base.hardware.cluster import NODE_TYPES
from meshwright.planner.calibration.run_prediction import device_preset

SIZE_NAME = re.compile(r"(?P<device>.{1,200}):(?P<devices>[0-9]{1,7})x(?P<nodes>[0-9]{1,7})")
"""What `Cluster.size_name` returns."""


def machine_notes(plan: Mapping[str, Any], start: Mapping[str, Any], planned_for: str) -> list[str]:
    """Returns a sentence for each difference between the machine of a plan and that of the run.

    Args:
        plan: plan.json, the prediction of the newest attempt.
        start: the start record of rank 0.
        planned_for: the setting of this name, the cluster that the layout was planned for.
    """
    if not start:
        return []
    there = describe_machine(start)
    notes = []
    cluster, device = text(plan.get("cluster")), text(plan.get("device"))
    if cluster and device and not is_device_of_run(device, start):
        named = device if cluster in (device, "here") else f"{cluster} ({device})"
        notes.append(
            f"the prediction was made for another machine: for {named}, and the run was on {there}; predicted times do "
            "not apply to it"
        )
    host, hosts = text(plan.get("host")), host_names(start)
    if host and hosts and host not in hosts:
        notes.append(f"the prediction was made on another host: on {host}, and the run was on {', '.join(hosts[:4])}")
    if (match := SIZE_NAME.fullmatch(planned_for)) is not None:
        if not is_device_of_run(match["device"], start):
            notes.append(
                f"the layout was planned for another machine: for {planned_for}, and the run was on {there}; "
                "meshwright plan --cluster here plans it for this one"
            )
        elif hosts and len(hosts) != int(match["nodes"]):
            notes.append(
                f"the layout was planned for another cluster: for {planned_for}, which has {match['nodes']} nodes, and "
                f"the run was on {len(hosts)} hosts"
            )
    return notes


def is_device_of_run(device: str, start: Mapping[str, Any]) -> bool:
    """Whether a plan's device is that of the run: the GPU by torch's name or the planner's, or the processor."""
    used, processor = text(start.get("device")), text(start.get("processor"))
    if used == "cpu":
        return device == processor if processor else device not in NODE_TYPES
    return device in (used, device_preset(used))


def describe_machine(start: Mapping[str, Any]) -> str:
    used, hosts = text(start.get("device")), host_names(start)
    named = text(start.get("processor")) or used if used == "cpu" else used
    where = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    return f"{named or 'an unknown device'}{where}"


def host_names(start: Mapping[str, Any]) -> list[str]:
    """The hosts of a run, each once, in order."""
    hosts = start.get("hosts")
    return sorted({text(host) for host in hosts}) if isinstance(hosts, list) else []


def text(value: Any) -> str:
    return value[:100] if isinstance(value, str) else ""
