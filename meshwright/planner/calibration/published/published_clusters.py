"""Parses the devices of a published run and the network that its text states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.base.config.reader import shorten
from meshwright.base.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import parse_count, parse_measurement

DEVICES: dict[str, dict[int, str]] = {
    "a100": {0: "a100-80", 40: "a100-40", 80: "a100-80"},
    "a800": {0: "a800", 80: "a800"},
    "h100": {0: "h100", 80: "h100", 94: "h100-500w", 96: "h100-500w"},
    "h800": {0: "h800", 80: "h800"},
    "h200": {0: "h200", 141: "h200"},
    "h20": {0: "h20", 96: "h20"},
    "gh200": {0: "gh200", 96: "gh200"},
    "b200": {0: "b200", 180: "b200", 192: "b200"},
    "b300": {0: "b300", 288: "b300"},
    "gb200": {0: "gb200", 192: "gb200"},
    "gb300": {0: "gb300", 288: "gb300"},
    "v100": {0: "v100-32", 32: "v100-32"},
    "l40s": {0: "l40s", 48: "l40s"},
    "4090": {0: "rtx4090", 24: "rtx4090"},
    "mi300x": {0: "mi300x", 192: "mi300x"},
}
"""Chip -> GB of memory, 0 if a run does not state them -> the planner's device."""
CHIP = re.compile(rf"(?<![a-z0-9])(?:\d{{1,6}} ?x ?)?(?:rtx ?)?({'|'.join(DEVICES)})(?![a-z0-9])")
MEMORY = re.compile(r"(?<![\d.])(\d{2,3}) ?gi?b?\b(?! ?/)")
"""Memory in the text after a chip: 80, 80GB, 96 GiB; not the 3 TB/s of it."""
OTHER_BOARDS = re.compile(r"pcie|\bnvl\b|\bcnx\b")
"""Boards of a chip that have lower clocks, slower memory and no NVLink switch."""
NETWORKS: tuple[tuple[str, bool], ...] = (
    (r"inter-node (?P<size>\d{1,6}) Gb/s", False),
    (r"(?<!\d)(?P<count>\d{1,4}) ?x ?(?P<size>\d{1,6}) ?Gb(?:ps|/s|it/s)?(?=[ ,;.)]|$)", False),
    (r"(?<!\d)(?P<size>\d{1,6}) ?Gb(?:ps|/s) node-node", False),
    (r"(?<!\d)(?P<size>\d{1,6}) ?Gb(?:ps|/s)(?: [\w-]{1,40})? per GPU", True),
    (r"(?<!\d)(?P<size>\d{1,6}) ?Gb(?:ps|/s)(?: [\w-]{1,40})? per node", False),
)
"""How runs state their network in Gb/s: a pattern for the size and the number of adapters, and whether it is that of a
device, not of a node."""
SOURCE_NETWORKS: tuple[tuple[str, float], ...] = (("bigscience", 400),)
"""A word in the text of a run that states no network -> Gb/s of a node, which other records of the source state."""

MAX_NODE_DEVICES = 16
"""The most devices of one node: an NVLink domain with more of them spans nodes."""
TRAY_DEVICES = 4
"""Devices in a node of a rack: a compute tray of an NVL72 has two hosts with two devices each."""


class ParsedCluster(NamedTuple):
    """The devices of a run."""

    cluster: Cluster
    node_devices: int
    """devices of a node, of which an NVLink domain may have several"""
    derived: tuple[str, ...] = ()
    """what the run does not state"""


def parse_cluster(row: Mapping[str, Any], devices: int, text: str) -> ParsedCluster:
    """Returns the cluster of a run; `text` may state its network."""
    name = parse_device(row["gpu"])
    node = NODE_TYPES[name]
    cluster, per_node, derived = preset_cluster(name, devices), node.devices, ""
    rack = node.devices > MAX_NODE_DEVICES
    if row.get("gpus_per_node") is not None:
        per_node = parse_count(row, "gpus_per_node", maximum=node.devices if rack else MAX_NODE_DEVICES)
        if devices > per_node and devices % per_node:
            raise ConfigError(f"gpus = {devices} is not a multiple of gpus_per_node = {per_node}")
        if not rack:  # NVLink ends at the node
            in_node = min(per_node, devices)
            cluster = replace(cluster, devices_per_node=in_node, nodes=devices // in_node)
    elif rack:
        per_node, derived = TRAY_DEVICES, f"nodes of {TRAY_DEVICES} devices, which the run does not state"
    gigabits, per_device = stated_network(text)
    if not gigabits:
        return ParsedCluster(cluster, per_node)
    sharing = 1 if per_device else per_node
    return ParsedCluster(
        with_network(cluster, gigabits, sharing), per_node, (derived,) if derived and sharing > 1 else ()
    )


def stated_network(text: str) -> tuple[float, bool]:
    """Returns the Gb/s that a text states, 0 if it states none, and whether they are those of a device."""
    for pattern, per_device in NETWORKS:
        if match := re.search(pattern, text):
            stated = float(match["size"]) * float(match.groupdict().get("count") or 1)
            return parse_measurement({"network in Gb/s": stated}, "network in Gb/s"), per_device
    return next((gigabits for word, gigabits in SOURCE_NETWORKS if word in text), 0.0), False


def with_network(cluster: Cluster, gigabits: float, devices: int) -> Cluster:
    """Returns a cluster whose devices share so many Gb/s of the network."""
    return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=gigabits / 8 * GB / devices))


def parse_device(gpu: str) -> str:
    """Returns the planner's name of a device; raises ConfigError if it is another board."""
    text = re.sub(r"[-_()\[\],]", " ", gpu.lower())
    chip = CHIP.search(text)
    name = None
    if chip and not OTHER_BOARDS.search(text):
        memory = MEMORY.search(text, chip.end()) or re.match(r" (\d{2,3})(?![\w.])", text[chip.end() :])
        name = DEVICES[chip[1]].get(int(memory[1]) if memory else 0)
        if chip[1] == "h100" and "500w" in text.replace(" ", ""):
            name = "h100-500w"
    if name is None:
        raise ConfigError(f"device {shorten(gpu)!r} is unknown", f"expected one of {', '.join(NODE_TYPES)}")
    return name
