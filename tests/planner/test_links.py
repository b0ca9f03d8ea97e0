"""Links: shares of network adapters, in-switch all-reduces, and the nodes of known GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.adapters import (
    groups_at_once,
    sender_bandwidth,
    senders_at_once,
)
from meshwright.base.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.base.hardware.cluster_file import read_cluster
from meshwright.base.hardware.links import GroupPlacement, collective_seconds
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import MEGATRON_2024

MIB = 1 << 20
H200_ALL_REDUCE = {1: 39.93, 4: 107.16, 16: 219.89, 64: 346.51, 256: 436.15, 1024: 463.58, 16384: 482.26}
"""Measured bus bandwidth in GB/s by message size in MiB, eight H200s (stas00/ml-engineering, CC-BY-SA)."""


def megatron_job(layout: Layout) -> PlannedJob:
    model = Architecture("small", 8, 1024, 8, 8, 128, 4096, 32000)
    cluster, batch = preset_cluster("h100", layout.ranks), Batch(64, 1, layout.data_degree, 64 // layout.data_degree)
    return PlannedJob(model, cluster, layout, batch, 2048, trainer=MEGATRON_2024)


def bus_bandwidth(collective: str, message_bytes: float, ranks: int) -> float:
    seconds = collective_seconds(preset_cluster("h200", 8), collective, message_bytes, GroupPlacement(ranks, ranks))
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * message_bytes / seconds / GB


def test_groups_of_a_node_share_its_adapters() -> None:
    assert [groups_at_once(8, ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    cluster = preset_cluster("h100", 64)
    alone, shared = (collective_seconds(cluster, "all_reduce", 1e11, GroupPlacement(8 * own, own)) for own in (8, 2))
    assert shared * 2 * 63 / 64 == pytest.approx(4 * alone * 2 * 15 / 16, rel=0.01)


NETWORK_CURVE = ((2.0**20, 9.0 * GB), (2.0**24, 90.0 * GB), (2.0**30, 360.0 * GB))
"""Message bytes and bus bandwidth of one group with all ranks of several nodes, as nccl-tests prints them."""


def cluster_with_curve(devices: int = 64) -> Cluster:
    cluster = preset_cluster("h100", devices)
    return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth_curve=NETWORK_CURVE))


def test_measured_curve_between_nodes_is_that_of_a_group_with_all_devices() -> None:
    for size, rate in NETWORK_CURVE:
        seconds = collective_seconds(cluster_with_curve(), "all_reduce", size, GroupPlacement(64, 8))
        assert seconds == pytest.approx(2 * 63 / 64 * size / rate)
        seconds = collective_seconds(cluster_with_curve(), "all_gather", size, GroupPlacement(64, 8))
        assert seconds == pytest.approx(63 / 64 * size / rate)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_groups_that_share_a_measured_curve_take_as_long_as_one_group_with_their_messages(ranks_per_node: int) -> None:
    cluster, groups = cluster_with_curve(), 8 // ranks_per_node
    placement, size = GroupPlacement(8 * ranks_per_node, ranks_per_node), 2.0**22
    wire, whole = (n - 1 for n in (placement.ranks, 64))
    seconds = collective_seconds(cluster, "all_gather", size, placement) / wire * placement.ranks
    together = collective_seconds(cluster, "all_gather", groups * size, GroupPlacement(64, 8)) / whole * 64
    assert seconds == pytest.approx(together)


@pytest.mark.parametrize("collective", ["all_to_all", "send"])
def test_a_device_has_its_share_of_a_measured_curve(collective: str) -> None:
    placement = GroupPlacement(64, 8) if collective == "all_to_all" else GroupPlacement(2, 1, 8)
    across = 56 / 64 if collective == "all_to_all" else 1
    seconds = collective_seconds(cluster_with_curve(), collective, 2.0**31, placement)
    assert seconds == pytest.approx(across * 2**31 / (360 * GB / 8), rel=1e-3)  # latencies inside a node


def test_bandwidth_of_a_cluster_file_with_a_curve_alone_is_the_share_of_a_device(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        'like = "h100"\nnodes = 4\n[inter_node]\nbandwidth_gbs = 40.0\ncurve = [[1048576, 9.0], [1073741824, 360.0]]\n'
    )
    given = read_cluster(file)
    assert given.inter_node.bandwidth == 40 * GB
    assert collective_seconds(given, "all_gather", 2.0**30, GroupPlacement(32, 8)) == pytest.approx(
        31 / 32 * 2**30 / (360 * GB)
    )
    file.write_text(
        "nodes = 4\ndevices_per_node = 8\n[device]\nmemory_gb = 80\nmemory_bandwidth_gbs = 3000\n"
        "peak_tflops = {bf16 = 900}\n[intra_node]\nbandwidth_gbs = 450\n"
        "[inter_node]\ncurve = [[1048576, 9.0], [1073741824, 360.0]]\n"
    )
    assert read_cluster(file).inter_node.bandwidth == pytest.approx(45 * GB)


def test_ranks_of_a_stage_that_fill_a_node_all_send_at_once() -> None:
    """Tensor degree 4 on nodes of 8: with data parallelism two pipelines share the adapters."""
    assert senders_at_once(8, 4 * 2) == 8
    assert senders_at_once(8, 4 * 16) == 8
    assert senders_at_once(8, 4) == 4
    assert group_placements(megatron_job(Layout(4, 1, 2, 1, 4, 1)))["pipeline"] == GroupPlacement(2, 1, 8)
    assert group_placements(megatron_job(Layout(4, 1, 1, 1, 4, 1)))["pipeline"] == GroupPlacement(2, 1, 4)


def test_a_sender_drives_at_most_one_adapter() -> None:
    assert sender_bandwidth(400.0, 8, 8) == 50.0
    assert sender_bandwidth(400.0, 8, 4) == 50.0
    assert sender_bandwidth(400.0, 4, 4) == 100.0
    few = replace(preset_cluster("h100", 16), adapters_per_node=4)
    alone, shared = (collective_seconds(few, "send", 1e9, GroupPlacement(2, 1, senders)) for senders in (4, 8))
    assert shared == pytest.approx(2 * alone, rel=0.01)


@pytest.mark.parametrize("mib", H200_ALL_REDUCE)
def test_all_reduce_in_the_switch_agrees_with_the_measured_curve(mib: int) -> None:
    """Messages under 16 MiB are bound by latencies that the model overestimates."""
    assert bus_bandwidth("all_reduce", mib * MIB, 8) == pytest.approx(
        H200_ALL_REDUCE[mib], rel=0.1 if mib >= 16 else 0.4
    )


def test_in_switch_reduction_speeds_up_the_all_reduce_only() -> None:
    """Measured on eight H200s at 16 GiB: all-reduce 480 GB/s, all-gather 361, reduce-scatter 363."""
    assert bus_bandwidth("all_reduce", 1 << 34, 8) == pytest.approx(480, rel=0.01)
    assert bus_bandwidth("all_gather", 1 << 34, 8) == pytest.approx(361, rel=0.01)
    assert bus_bandwidth("reduce_scatter", 1 << 34, 8) == pytest.approx(363, rel=0.01)
    assert bus_bandwidth("all_reduce", 1 << 34, 2) == pytest.approx(361, rel=0.01)


def test_export_boards_have_slower_links_than_their_originals() -> None:
    for export, original in (("h800", "h100"), ("a800", "a100-80")):
        assert NODE_TYPES[export].intra_node.bandwidth == 200 * GB < NODE_TYPES[original].intra_node.bandwidth
        assert NODE_TYPES[export].device.peak_flops == NODE_TYPES[original].device.peak_flops
