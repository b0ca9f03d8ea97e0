"""Token copies and time of the all-to-all of experts, flat or hierarchical; torch-free.

A rank routes each of its tokens to K of E experts, which are divided over R ranks, g of them per node, on N nodes. The
routed experts of a token are distinct, so the expected number of groups (ranks or nodes) that hold at least one is

    distinct(G) = G (1 - C(E - E / G, K) / C(E, K))

| all-to-all | copies of a token over the network | copies of a token inside nodes |
|---|---|---|
| flat (NCCL) | K (R - g) / R | K (g - 1) / R |
| hierarchical (DeepEP, HybridEP) | distinct(N) (N - 1) / N | distinct(R) (g - 1) / g |

A hierarchical all-to-all sends a token to each node once, to the rank with the sender's index, which forwards it inside
the node to each rank once (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). Node-limited routing chooses the experts of a
token from M of the N nodes: then M replaces N in `distinct`, and K experts are drawn from M / N of all. Both links
transfer at the same time. The combine sends the same copies back: partial sums are added inside the node first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class TokenCopies:
    """Expected copies of one token that leave its rank in a dispatch."""

    inside_node: float
    """copies over the intra-node link"""
    across_nodes: float
    """copies over the network"""

    @property
    def total(self) -> float:
        return self.inside_node + self.across_nodes


@cache
def distinct_groups(groups: int, experts: int, active: int) -> float:
    """The expected number of groups that hold at least one of `active` distinct experts."""
    others = experts - experts / groups
    none_chosen = 1.0
    for drawn in range(active):
        none_chosen *= max(0.0, others - drawn) / (experts - drawn)
    return groups * (1 - none_chosen)


@cache
def token_copies(
    experts: int, active: int, ranks: int, ranks_per_node: int, hierarchical: bool, node_limit: int = 0
) -> TokenCopies:
    """The copies of one token. `node_limit` is the number of nodes that its experts are chosen from; 0 for all."""
    per_node = min(ranks, ranks_per_node)
    nodes = -(-ranks // per_node)
    if not hierarchical:
        return TokenCopies(active * (per_node - 1) / ranks, active * (ranks - per_node) / ranks)
    limit = min(nodes, node_limit or nodes)
    reachable = max(active, experts * limit // nodes)
    on_ranks = distinct_groups(limit * per_node, reachable, active)
    on_nodes = distinct_groups(limit, reachable, active) if nodes > 1 else 0.0
    return TokenCopies(on_ranks * (per_node - 1) / per_node, on_nodes * (nodes - 1) / nodes)


def reachable_nodes(nodes: int, groups: int, groups_active: int) -> int:
    """Nodes that the experts of a token can be on, if the router chooses `groups_active` of `groups` groups of experts;
    0 for all. Groups are consecutive experts, so that a node has whole groups if there are at least as many groups.
    """
    if not groups or not groups_active or nodes > groups:
        return 0
    return min(nodes, groups_active)


def transfer_seconds(inside_bytes: float, across_bytes: float, intra_node_rate: float, inter_node_rate: float) -> float:
    """Seconds in which both links transfer their bytes, at the same time."""
    return max(inside_bytes / intra_node_rate, across_bytes / inter_node_rate)
