"""Which ranks an axis connects, over which links, and what a collective costs there by the planner's link model."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.base.hardware.cluster import Cluster, Link, preset_cluster
from meshwright.base.hardware.links import GroupPlacement, collective_seconds, group_placement
from meshwright.base.topology.collectives import wire_bytes
from meshwright.base.topology.layout import Layout
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.communication.axis_traffic import axis_options
from meshwright_practice.experiments.counted_training import count_layouts
from meshwright_practice.pictures import Bars, Curves, HeatMap

KIB, MICROSECONDS = 1024, 1e6


def placement_table(knobs: Knobs) -> Observation:
    """The coordinates of every rank of a layout on two nodes, and the nodes that the groups of each axis span."""
    tensor, pipeline, replicate = int(knobs["tensor"]), int(knobs["pipeline"]), int(knobs["replicate"])
    layout = Layout(tensor=tensor, pipeline=pipeline, replicate=replicate)
    per_node = layout.ranks // 2
    replicas = [layout.group(rank, "pipeline", "tensor") for rank in range(layout.ranks)]
    of_first = [rank for rank in range(layout.ranks) if layout.coordinates(rank)["replicate"] == 0]
    values: dict[str, float] = {
        "ranks": layout.ranks,
        "ranks_per_replica": len(replicas[0]),
        "stages_per_replica": stages(layout, replicas[0]),
        "fewest_stages_of_a_replica": min(stages(layout, replica) for replica in replicas),
        "stages_on_node_0": stages(layout, range(per_node)),
        "replicas_on_node_0": len({layout.coordinates(rank)["replicate"] for rank in range(per_node)}),
        "nodes_of_a_replica": nodes(of_first, per_node),
        "first_replica_is_a_group": int(of_first == replicas[0]),
        "samples_of_replica": len({layout.data_coordinate(rank) for rank in replicas[0]}),
        "data_degree": layout.data_degree,
    }
    for axis in ("tensor", "replicate", "pipeline"):
        values[f"nodes_of_{axis}_group"] = max(nodes(group, per_node) for group in layout.groups(axis))
    columns = ("node", "pipeline", "replicate", "tensor")
    table = []
    for rank in range(layout.ranks):
        coordinates = layout.coordinates(rank)
        table.append((float(rank // per_node), *(float(coordinates[axis]) for axis in columns[1:])))
    rows = tuple(f"rank {rank}" for rank in range(layout.ranks))
    picture = HeatMap("coordinates of every rank", "coordinate", rows, columns, tuple(table))
    return Observation(values, picture, (f"Layout {layout} on two nodes of {per_node} ranks.",))


def stages(layout: Layout, ranks: Iterable[int]) -> int:
    """The number of pipeline stages that some ranks have together."""
    return len({layout.coordinates(rank)["pipeline"] for rank in ranks})


def nodes(ranks: Iterable[int], per_node: int) -> int:
    return len({rank // per_node for rank in ranks})


def ring_time(knobs: Knobs) -> Observation:
    """The time of a ring all-reduce among n ranks: 2 (n - 1) latencies, and 2 (n - 1) / n of the message."""
    message, small, large = int(knobs["kibibytes"]) * KIB, 8, int(knobs["ranks"])
    link = Link(bandwidth=50e9 / 0.8, latency=10e-6)  # the model reaches 80 % of the data sheet: 50 GB/s
    device = preset_cluster("h100").device
    counts = sorted({2, 4, small, 16, 32, 64, 128, 256, large})
    seconds, wires = {}, {}
    for ranks in counts:
        ring = Cluster("ring", device, ranks, 1, link, link)
        seconds[ranks] = collective_seconds(ring, "all_reduce", message, GroupPlacement(ranks, ranks))
        wires[ranks] = wire_bytes("all_reduce", message, ranks) / message
    tree = Cluster("tree", device, 1, large, link, link)
    values: dict[str, float] = {
        "seconds_small": seconds[small] * MICROSECONDS,
        "seconds_large": seconds[large] * MICROSECONDS,
        "growth": seconds[large] / seconds[small],
        "wire_small": wires[small],
        "wire_large": wires[large],
        "wire_growth": wires[large] / wires[small],
        "latency_share_large": 2 * (large - 1) * link.latency / seconds[large],
        "tree_seconds_large": collective_seconds(tree, "all_reduce", message, GroupPlacement(large, 1)) * MICROSECONDS,
    }
    times = tuple(seconds[ranks] * MICROSECONDS for ranks in counts)
    picture = Curves("ring all-reduce", "ranks", "microseconds", tuple(map(float, counts)), {"ring": times})
    note = "The link has 10 microseconds per hop and 50 GB/s. Among nodes, the planner expects a tree, as NCCL chooses."
    return Observation(values, picture, (note,))


def tensor_placement(knobs: Knobs) -> Observation:
    """Where in a step the collectives of tensor and of data parallelism begin, counted on two ranks, and what those of
    a large model take inside a node and across nodes, by the planner's link model.
    """
    counted = count_layouts(2, {axis: axis_options(axis, 2) for axis in ("tensor", "data")})
    cluster = preset_cluster(str(knobs["device"]), 16)
    tensor, layers = int(knobs["tensor"]), 32
    tokens, width, element = 4096, 4096, 2
    message = tokens * width * element
    inside = group_placement(cluster.devices_per_node, tensor, 1)
    outside = GroupPlacement(tensor, 1)
    per_block = 4  # two in forward and two in backward
    values: dict[str, float] = {"tensor": tensor, "collectives_per_step": per_block * layers}
    for axis, [step, *_] in counted.items():
        values[f"in_forward_{axis}"] = step.calls_by_phase.get("forward", 0)
    for name, placement in (("inside", inside), ("across", outside)):
        seconds = collective_seconds(cluster, "all_reduce", message, placement)
        values[f"nodes_{name}"] = placement.nodes
        values[f"tensor_{name}"] = per_block * layers * seconds * 1e3
    gradient = 12 * width * width * layers * element / tensor
    replicas = 16 // tensor
    data_across = GroupPlacement(replicas, cluster.devices_per_node // tensor)
    values["data_across"] = collective_seconds(cluster, "all_reduce", gradient, data_across) * 1e3
    values["slowdown"] = values["tensor_across"] / values["tensor_inside"]
    values["message_ratio"] = per_block * layers * message / gradient
    labels = ("tensor, inside a node", "tensor, across nodes", "data, across nodes")
    parts: dict[str, tuple[float, ...]] = {
        "time": (values["tensor_inside"], values["tensor_across"], values["data_across"])
    }
    note = (
        "Tensor-parallel time is exposed: a block cannot go on before its collective ends. Data-parallel time can "
        "overlap with the backward pass."
    )
    return Observation(values, Bars("communication of one step", "ms", labels, parts), (note,))
