"""How long a collective takes on the links of a cluster, by its size and by where its ranks stand.

A ring sends what the wire count says at the rate of its slowest hop. Inside a node that is the node's link; between
nodes it is what the group's ranks of one node have of adapters, since each rank drives its own share while other groups
drive theirs. Every hop adds its latency; between nodes an all-reduce goes by trees, whose depth is a logarithm.

| collective | hops | bytes on the wire |
|---|---|---|
| all_gather, reduce_scatter | n - 1 | (n - 1) / n of the message |
| all_reduce | 2 (n - 1), or 2 log2 of the nodes | twice that |
| all_to_all | n - 1, in parallel | (n - 1) / n |
| send | 1 | all |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, exp, log, log2

from meshwright.planner.hardware.cluster import Cluster, Link
from meshwright.topology.collectives import wire_bytes

REACHED = 0.8
"""Share of a link's printed bandwidth that a ring reaches (A100 78 %, H200 82 % of one direction)."""
SETTLES = 12 * 2.0**20
"""Bytes about which a collective leaves its protocol for small messages: that costs one and a half latencies more."""


@dataclass(frozen=True)
class GroupPlacement:
    """Where the ranks of one group stand."""

    ranks: int
    ranks_per_node: int
    """of them, on one node"""

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.ranks_per_node)

    @property
    def link(self) -> str:
        return "intra-node" if self.nodes == 1 else "inter-node"


def group_placement(per_node: int, ranks: int, stride: int) -> GroupPlacement:
    """Of a group whose neighbours are `stride` ranks apart; ranks fill one node of so many devices after the other."""
    return GroupPlacement(ranks, max(1, min(ranks, per_node // stride)))


def collective_seconds(cluster: Cluster, kind: str, message: float, place: GroupPlacement) -> float:
    """Seconds of one collective of so many bytes, whole."""
    if place.ranks == 1 or message <= 0:
        return 0.0
    return _seconds(_links(cluster), kind, message, place)


@dataclass(frozen=True)
class Links:
    """The links alone, which can be a key."""

    inside: Link
    between: Link


def _links(cluster: Cluster) -> Links:
    return Links(cluster.intra_node, cluster.inter_node)


@cache
def _seconds(links: Links, kind: str, message: float, place: GroupPlacement) -> float:
    wire = wire_bytes(kind, int(message), place.ranks)
    if seen := measured_curve(links.inside if place.nodes == 1 else links.between, kind, place.ranks):
        return wire / along(seen, message)
    if kind == "send":
        link = links.inside if place.nodes == 1 else links.between
        return link.latency + wire / bus(link, message)
    near = place.ranks if place.nodes == 1 else place.ranks_per_node
    hops = near - 1
    if place.nodes == 1:
        rate, latency = bus(links.inside, message), hops * links.inside.latency
    else:
        rate = min(bus(links.inside, message), place.ranks_per_node * bus(links.between, message))
        far = log2(place.nodes) if kind == "all_reduce" else place.nodes - 1
        latency = hops * links.inside.latency + far * links.between.latency
    if kind == "all_to_all":
        return latency + exchanged(links, message, place)
    if kind == "all_reduce":
        latency *= 2
    measured = bool(links.inside.bandwidth_curve if place.nodes == 1 else links.between.bandwidth_curve)
    settling = 0.0 if measured else 1.5 * latency * message / (message + SETTLES)
    return (0.0 if measured else latency) + settling + wire / rate


def exchanged(links: Links, message: float, place: GroupPlacement) -> float:
    """Every rank sends to every other: what stays on the node and what leaves it go by different links."""
    away = message * (place.ranks - place.ranks_per_node) / place.ranks if place.nodes > 1 else 0.0
    near = message * (min(place.ranks_per_node, place.ranks) - 1) / place.ranks
    return max(near / bus(links.inside, message), away / bus(links.between, message))


def bus(link: Link, message: float) -> float:
    """Bytes a second: of a measured curve at this size, or what a ring reaches of the link."""
    return along(link.bandwidth_curve, message) if link.bandwidth_curve else link.bandwidth * REACHED


def measured_curve(link: Link, kind: str, ranks: int) -> tuple[tuple[float, float], ...]:
    """Of this collective among about as many ranks, where somebody measured."""
    same = [curve for curve in link.collective_curves if curve.collective == kind]
    return min(same, key=lambda curve: abs(curve.ranks - ranks)).points if same else ()


def along(points: tuple[tuple[float, float], ...], message: float) -> float:
    """Between the points of a curve, in logarithms."""
    if message <= points[0][0]:
        return points[0][1] * message / points[0][0]
    for (small, slow), (large, fast) in pairwise(points):
        if message <= large:
            share = log(message / small) / log(large / small)
            return exp(log(slow) + share * log(fast / slow))
    return points[-1][1]
