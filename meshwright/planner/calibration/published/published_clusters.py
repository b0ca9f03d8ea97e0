"""Parses the devices of a published run and the network that its text states."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.base.config.reader import shorten
from meshwright.base.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import parse_measurement

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


def parse_cluster(gpu: str, devices: int, text: str) -> Cluster:
    """Returns the cluster of a run; `text` may state its network."""
    name = parse_device(gpu)
    cluster = preset_cluster(name, devices)
    for pattern, per_device in NETWORKS:
        if match := re.search(pattern, text):
            stated = float(match["size"]) * float(match.groupdict().get("count") or 1)
            gigabits = parse_measurement({"network in Gb/s": stated}, "network in Gb/s")
            return with_network(cluster, gigabits, 1 if per_device else NODE_TYPES[name].devices)
    for word, gigabits in SOURCE_NETWORKS:
        if word in text:
            return with_network(cluster, gigabits, NODE_TYPES[name].devices)
    return cluster


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
