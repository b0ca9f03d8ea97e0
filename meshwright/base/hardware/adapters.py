"""Shares of a node's network adapters, which process groups use at the same time; torch-free.

The adapters of a node are shared by all groups that have ranks on it and communicate at the same time:

    bytes/s of a group = bytes/s of the node's adapters / groups of the node at the same time

| communication | groups of a node at the same time | ranks per node and group | share of one rank |
|---|---|---|---|
| ring or tree of a data-parallel group | devices / ranks per node and group | any | 1 / devices |
| send to the next stage | one per rank of the stages that end on the node | 1 | 1 / senders |
| all-to-all of experts | one per rank | 1 | 1 / devices |

All ranks of a node send at the same time if the ranks of one stage fill it: with tensor degree 4 on nodes of 8, two
pipelines share the adapters. If a node has several stages, only the ranks of the last one send to the next node. A rank
drives at most its own adapter. Communication of different kinds shares the adapters, too: in the cost trace, gradient
reductions wait while sends or all-to-alls occupy them.
"""

from __future__ import annotations


def groups_at_once(devices_per_node: int, ranks_per_node: int) -> int:
    """Groups with `ranks_per_node` ranks on each node that share its adapters."""
    return max(1, devices_per_node // max(1, ranks_per_node))


def senders_at_once(devices_per_node: int, ranks_per_stage: int) -> int:
    """Ranks of a node that send to the next pipeline stage on another node at the same time."""
    return max(1, min(devices_per_node, ranks_per_stage))


def sender_bandwidth(node_bandwidth: float, adapters: int, senders: int) -> float:
    """Bytes/s of one rank that sends: its share of the adapters, and at most one of them."""
    return min(node_bandwidth / senders, node_bandwidth / max(1, adapters))
