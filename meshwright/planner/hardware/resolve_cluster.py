"""The cluster that a word on the command line means: usual nodes of a device, a cluster file, or this machine as
measured; torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.io import atomic_write, output_file
from meshwright.planner.hardware.cluster import NODES, Cluster, preset_cluster
from meshwright.planner.hardware.cluster_file import MAX_DEVICES, cluster_toml, read_cluster

COUNTED = re.compile(r"(?P<device>[^:]+)(:(?P<devices>[0-9]{1,7})(x(?P<nodes>[0-9]{1,7}))?)?")
CLUSTER_NAMES = (
    f"{', '.join(NODES)}, each also as h100:8 (devices) or h100:8x16 (16 nodes of 8), here, or a cluster file (.toml)"
)


def meshwright_home() -> Path:
    """Where this machine keeps what it knows of itself."""
    given = os.environ.get("MESHWRIGHT_HOME")
    return Path(given) if given else Path.home() / ".meshwright"


def machine_file() -> Path:
    return meshwright_home() / "machine.toml"


def resolve_cluster(word: str) -> Cluster:
    if word.endswith(".toml") or os.sep in word:
        return read_cluster(Path(word))
    match = COUNTED.fullmatch(word)
    device = match["device"].lower() if match else ""
    if match is None or (device != "here" and device not in NODES):
        raise ConfigError(f"no cluster {word!r}", f"allowed: {CLUSTER_NAMES}")
    devices, nodes = (int(match[key]) if match[key] else None for key in ("devices", "nodes"))
    if devices == 0 or nodes == 0 or (devices or 1) * (nodes or 1) > MAX_DEVICES:
        raise ConfigError(f"cluster {word!r} is out of range", f"allowed: 1 to {MAX_DEVICES:,} devices")
    whole = replace(measured_machine() if device == "here" else preset_cluster(device), name=word)
    if devices is None:
        return whole
    if device == "here" and (nodes or devices > whole.devices_per_node):
        raise ConfigError(
            f"cluster {word!r} is not this machine", f"allowed: here, or here:1 to here:{whole.devices_per_node}"
        )
    if nodes is None:
        return with_whole_nodes(whole, devices)
    if devices > whole.devices_per_node:
        raise ConfigError(
            f"cluster {word!r} has nodes of {devices}, and those of {device} have at most {whole.devices_per_node}",
            f"allowed: {device}:{whole.devices_per_node}x{nodes}, or a cluster file",
        )
    return replace(whole, devices_per_node=devices, nodes=nodes)


def with_whole_nodes(whole: Cluster, devices: int) -> Cluster:
    """A part of one node, or whole ones."""
    if devices > whole.devices_per_node and devices % whole.devices_per_node:
        below = devices // whole.devices_per_node * whole.devices_per_node
        raise ConfigError(
            f"{devices} devices of cluster {whole.name!r} are no whole nodes of {whole.devices_per_node}",
            f"allowed: {below}, {below + whole.devices_per_node}, or DEVICESxNODES",
        )
    return whole.with_devices(devices)


def measured_machine() -> Cluster:
    if not machine_file().exists():
        raise ConfigError("this machine was never measured", "run meshwright plan measure first")
    return read_cluster(machine_file())


def measurement_file(file: Path | None) -> Path:
    """Resolves where a measurement is written; called before measuring, so that a bad path is reported at once."""
    if file is None:
        machine_file().parent.mkdir(parents=True, exist_ok=True)
    return output_file(file or machine_file(), "--out")


def write_cluster(cluster: Cluster, remarks: Sequence[str], file: Path) -> None:
    """Writes a cluster file atomically."""
    atomic_write(file, cluster_toml(cluster, remarks))
