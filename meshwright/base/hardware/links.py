"""Estimates the time of a collective on the links of a cluster, from its size and the placement of its ranks.

A ring sends the wire bytes of the collective at the rate of its slowest hop. Within a node that is the intra-node link.
Across nodes it is the group's share of the node's adapters (`adapters.py`). Every hop adds its latency. An all-reduce
across nodes uses trees, so its latency grows with the logarithm of the number of nodes. Switches that reduce (NVLS)
raise the bus bandwidth of an all-reduce, and of nothing else: eight H200s reach 480 GB/s in an all-reduce, 361 in an
all-gather and 363 in a reduce-scatter (stas00/ml-engineering), so an all-reduce is faster than its two halves.

| collective | hops among n ranks | wire bytes per rank |
|---|---|---|
| all_gather, reduce_scatter | n - 1 | (n - 1) / n of the message |
| all_reduce | 2 (n - 1), or 2 log2(nodes) across nodes | 2 (n - 1) / n of the message |
| all_to_all | n - 1, in parallel | (n - 1) / n of the message |
| send | 1 | the message |

A measured curve of a link replaces latency and bandwidth. Between nodes it is that of a group with all devices of its
nodes, which has the adapters for itself, as one communicator of nccl-tests over all ranks measures it. Groups of a node
that communicate at the same time share it: g of them with a message each take as long as the measured group takes for g
messages. A curve of one collective and number of ranks (`collectives`) is used unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, exp, inf, log, log2

from meshwright.base.hardware.adapters import groups_at_once, sender_bandwidth
from meshwright.base.hardware.all_to_all import TokenCopies, transfer_seconds
from meshwright.base.hardware.cluster import Cluster, Link
from meshwright.base.topology.collectives import wire_bytes

RING_EFFICIENCY = 0.8
"""Fraction of a link's data-sheet bandwidth that a ring reaches (measured: A100 78 %, H200 82 % of one direction)."""
PROTOCOL_SWITCH_BYTES = 12 * 2.0**20
"""Message size around which a collective leaves its low-latency protocol, which costs 1.5 latencies more."""


@dataclass(frozen=True)
class GroupPlacement:
    """How the ranks of one process group are placed on nodes."""

    ranks: int
    """size of the process group"""
    ranks_per_node: int
    """ranks of the group on one node"""
    senders: int = 0
    """ranks of a node that send at the same time, for sends to the next stage; 0 for all devices of the node"""

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        return ceil(self.ranks / self.ranks_per_node)

    @property
    def link(self) -> str:
        """The slowest link that the group uses: intra-node or inter-node."""
        return "intra-node" if self.nodes == 1 else "inter-node"


def group_placement(devices_per_node: int, ranks: int, stride: int) -> GroupPlacement:
    """Returns the placement of a group whose members are `stride` ranks apart; ranks fill nodes in order."""
    return GroupPlacement(ranks, max(1, min(ranks, devices_per_node // stride)))


def collective_seconds(cluster: Cluster, collective: str, message_bytes: float, placement: GroupPlacement) -> float:
    """Estimates the seconds of one collective on a message of the given size (the full tensor)."""
    if placement.ranks == 1 or message_bytes <= 0:
        return 0.0
    return _seconds(cluster_links(cluster), collective, message_bytes, placement)


@dataclass(frozen=True)
class ClusterLinks:
    """The links of a cluster: unlike `Cluster`, a hashable cache key."""

    intra_node: Link
    inter_node: Link
    devices_per_node: int
    adapters: int
    """network adapters of a node"""

    def network_rate(self, message_bytes: float) -> float:
        """Bytes/s that all adapters of a node reach together, with the messages of all groups that share them."""
        if self.inter_node.bandwidth_curve:
            return interpolate(self.inter_node.bandwidth_curve, message_bytes)
        return self.devices_per_node * self.inter_node.bandwidth * RING_EFFICIENCY

    def device_rate(self, message_bytes: float) -> float:
        """Bytes/s of one device to other nodes while all devices of its node send messages of this size."""
        return self.network_rate(self.devices_per_node * message_bytes) / self.devices_per_node


def cluster_links(cluster: Cluster) -> ClusterLinks:
    adapters = cluster.adapters_per_node or cluster.devices_per_node
    return ClusterLinks(cluster.intra_node, cluster.inter_node, cluster.devices_per_node, adapters)


@cache
def _seconds(links: ClusterLinks, collective: str, message_bytes: float, placement: GroupPlacement) -> float:
    single_node = placement.nodes == 1
    wire = wire_bytes(collective, int(message_bytes), placement.ranks)
    link = links.intra_node if single_node else links.inter_node
    if points := nearest_curve(link, collective, placement.ranks):
        return wire / interpolate(points, message_bytes)
    if collective == "send":
        rate = bus_bandwidth(link, message_bytes) if single_node else links.device_rate(message_bytes)
        if not single_node and placement.senders:
            network = links.network_rate(placement.senders * message_bytes)
            rate = sender_bandwidth(network, links.adapters, placement.senders)
        return link.hop_latency + wire / rate
    intra_node_hops = (placement.ranks if single_node else placement.ranks_per_node) - 1
    latency = intra_node_hops * links.intra_node.hop_latency
    in_switch = collective == "all_reduce" and placement.ranks > 2  # NVLS needs more than two ranks
    rate = bus_bandwidth(links.intra_node, message_bytes, "all_reduce" if in_switch else "all_gather")
    if not single_node:
        groups = groups_at_once(links.devices_per_node, placement.ranks_per_node)
        shared = links.network_rate(groups * message_bytes) / groups
        rate = shared if link.bandwidth_curve else min(rate, shared)
        inter_node_hops = log2(placement.nodes) if collective == "all_reduce" else placement.nodes - 1
        latency += inter_node_hops * links.inter_node.hop_latency
    if collective == "all_to_all":
        return latency + all_to_all_transfer(links, message_bytes, placement)
    if collective == "all_reduce":
        latency *= 2
    if link.bandwidth_curve:  # a measured curve includes latencies
        return wire / rate
    protocol_switch = 1.5 * latency * message_bytes / (message_bytes + PROTOCOL_SWITCH_BYTES)
    return latency + protocol_switch + wire / rate


def all_to_all_transfer(links: ClusterLinks, message_bytes: float, placement: GroupPlacement) -> float:
    """Returns the transfer time of an all-to-all: intra-node and inter-node traffic use different links."""
    ranks, ranks_per_node = placement.ranks, placement.ranks_per_node
    inter_node_bytes = message_bytes * (ranks - ranks_per_node) / ranks if placement.nodes > 1 else 0.0
    intra_node_bytes = message_bytes * (min(ranks_per_node, ranks) - 1) / ranks
    return transfer_seconds(
        intra_node_bytes,
        inter_node_bytes,
        bus_bandwidth(links.intra_node, message_bytes),
        links.device_rate(inter_node_bytes) if inter_node_bytes else inf,
    )


def token_all_to_all_seconds(
    cluster: Cluster, token_bytes: float, copies: TokenCopies, placement: GroupPlacement
) -> float:
    """Estimates the seconds of a token dispatch or combine; `token_bytes` are those of all tokens of a rank, once."""
    links = cluster_links(cluster)
    link = links.intra_node if placement.nodes == 1 else links.inter_node
    sent = token_bytes * copies.total
    if points := nearest_curve(link, "all_to_all", placement.ranks):
        return sent / interpolate(points, sent * placement.ranks / (placement.ranks - 1))
    per_node = min(placement.ranks, placement.ranks_per_node)
    latency = (per_node - 1) * links.intra_node.hop_latency + (placement.nodes - 1) * links.inter_node.hop_latency
    across = token_bytes * copies.across_nodes
    return latency + transfer_seconds(
        token_bytes * copies.inside_node,
        across,
        bus_bandwidth(links.intra_node, sent),
        links.device_rate(across) if across else inf,
    )


def bus_bandwidth(link: Link, message_bytes: float, collective: str = "all_gather") -> float:
    """Returns bytes/s inside a node at this message size: from the measured curve, or what a ring reaches of the data
    sheet, or what an all-reduce reaches that the switch reduces.
    """
    if link.bandwidth_curve:
        return interpolate(link.bandwidth_curve, message_bytes)
    if collective == "all_reduce" and link.all_reduce_bandwidth:
        return link.all_reduce_bandwidth
    return link.bandwidth * RING_EFFICIENCY


def nearest_curve(link: Link, collective: str, ranks: int) -> tuple[tuple[float, float], ...]:
    """Returns the measured curve of this collective with the nearest number of ranks; empty if there is none."""
    measured = [curve for curve in link.collective_curves if curve.collective == collective]
    return min(measured, key=lambda curve: abs(curve.ranks - ranks)).points if measured else ()


def interpolate(points: tuple[tuple[float, float], ...], message_bytes: float) -> float:
    """Interpolates a bandwidth curve linearly in log-log space.

    Below the first point the time of a message is constant; above the last one the bandwidth is.
    """
    if message_bytes <= points[0][0]:
        return points[0][1] * message_bytes / points[0][0]
    for (small, slow), (large, fast) in pairwise(points):
        if message_bytes <= large:
            fraction = log(message_bytes / small) / log(large / small)
            return exp(log(slow) + fraction * log(fast / slow))
    return points[-1][1]
