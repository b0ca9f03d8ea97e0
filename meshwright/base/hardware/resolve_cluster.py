"""Resolves the cluster that `--cluster` names: a known GPU, a cluster file, or the measured machine; torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from meshwright.base.hardware.cluster import NODE_TYPES, Cluster, preset_cluster
from meshwright.base.hardware.cluster_file import MAX_DEVICES, cluster_toml, read_cluster
from meshwright.base.io import atomic_write, meshwright_home, output_file
from meshwright.errors import ConfigError

CLUSTER_PATTERN = re.compile(r"(?P<device>[^:]+)(:(?P<devices>[0-9]{1,400})(x(?P<nodes>[0-9]{1,400}))?)?")
MISSPELLED = re.compile(r"(?P<device>[^:]+?)[x*](?P<devices>[0-9]+)")


def cluster_names() -> str:
    """Lists what `--cluster` accepts, for error messages."""
    gpus = ", ".join(NODE_TYPES)
    return f"a GPU ({gpus}), h100:8 (devices), h100:8x16 (16 nodes of 8), here, or a cluster file (.toml)"


def similar_clusters(name: str) -> list[str]:
    """Returns what an unknown name may mean: the variants of a device (a100:8), or h100:8 for h100x8."""
    misspelled = MISSPELLED.fullmatch(name)
    device, colon, count = (misspelled["device"], ":", misspelled["devices"]) if misspelled else name.partition(":")
    device = device.lower()
    known = [device] if device in NODE_TYPES else [other for other in NODE_TYPES if other.startswith(f"{device}-")]
    names = [f"{other}{colon}{count}" for other in known or get_close_matches(device, NODE_TYPES, n=2)]
    return [other for other in names if other != name and CLUSTER_PATTERN.fullmatch(other)]


def machine_file() -> Path:
    """Returns the cluster file that `meshwright plan measure` writes, and that `--cluster here` reads."""
    return meshwright_home() / "machine.toml"


def resolve_cluster(name: str) -> Cluster:
    """Returns the cluster that `--cluster NAME` means."""
    if name.endswith(".toml") or os.sep in name:
        return read_cluster(Path(name))
    match = CLUSTER_PATTERN.fullmatch(name)
    device = match["device"].lower() if match else ""
    if match is None or (device != "here" and device not in NODE_TYPES):
        suggested = " or ".join(similar_clusters(name))
        meant = f"did you mean {suggested}? " if suggested else ""
        raise ConfigError(f"cluster {name!r} is unknown", f"{meant}expected {cluster_names()}")
    devices, nodes = (int(match[key]) if match[key] else None for key in ("devices", "nodes"))
    if devices == 0 or nodes == 0 or (devices or 1) * (nodes or 1) > MAX_DEVICES:
        raise ConfigError(f"cluster {name!r} is out of range", f"expected 1 to {MAX_DEVICES:,} devices")
    cluster = replace(measured_machine() if device == "here" else preset_cluster(device), name=name)
    if devices is None:
        return cluster
    if device == "here" and (nodes or devices > cluster.devices_per_node):
        raise ConfigError(
            f"cluster {name!r} is larger than this machine",
            f"expected here, or here:1 to here:{cluster.devices_per_node}",
        )
    if nodes is None:
        return with_whole_nodes(cluster, devices)
    if devices > cluster.devices_per_node:
        raise ConfigError(
            f"cluster {name!r} has nodes of {devices} devices, but a node of {device} has at most "
            f"{cluster.devices_per_node}",
            f"expected {device}:{cluster.devices_per_node}x{nodes}, or a cluster file",
        )
    return replace(cluster, devices_per_node=devices, nodes=nodes)


def with_whole_nodes(cluster: Cluster, devices: int) -> Cluster:
    """Returns a cluster of so many devices: part of one node, or full nodes only."""
    if devices > cluster.devices_per_node and devices % cluster.devices_per_node:
        below = devices // cluster.devices_per_node * cluster.devices_per_node
        raise ConfigError(
            f"{devices} devices of cluster {cluster.name!r} do not fill nodes of {cluster.devices_per_node}",
            f"expected {below} or {below + cluster.devices_per_node} devices, or DEVICESxNODES",
        )
    return cluster.with_devices(devices)


def measured_machine() -> Cluster:
    """Returns this machine as `meshwright plan measure` measured it."""
    if not machine_file().exists():
        raise ConfigError("this machine was never measured", "try meshwright plan measure first")
    return read_cluster(machine_file())


def measurement_file(file: Path | None) -> Path:
    """Resolves where a measurement is written; called before measuring, so that a bad path is reported at once."""
    if file is None:
        try:
            machine_file().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{machine_file().parent} cannot be created: {error.strerror}",
                "try --out FILE, or MESHWRIGHT_HOME=DIR with a writable folder",
            ) from None
    return output_file(file or machine_file(), "--out")


def write_cluster(cluster: Cluster, remarks: Sequence[str], file: Path) -> None:
    """Writes a cluster file atomically; each remark becomes a comment."""
    atomic_write(file, cluster_toml(cluster, remarks))
