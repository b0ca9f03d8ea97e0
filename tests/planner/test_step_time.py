"""The time of a step follows from shapes, links and what hides what."""

from __future__ import annotations

from collections import Counter
from csv import DictReader
from dataclasses import replace
from math import isclose
from pathlib import Path
from statistics import median

import pytest

from meshwright.config import derive_batch, load_config
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.kernel_time import KernelRate, matmul_time
from meshwright.planner.cost.layer_time import embedding_time, head_time, layer_shape, layer_time
from meshwright.planner.exact.comm_volume import comm_volume
from meshwright.planner.hardware.cluster import Link, preset_cluster
from meshwright.planner.hardware.links import GroupPlacement, collective_seconds, group_placement
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology.layout import Layout

H200 = KernelRate(683e12, 4.1e12, 132, 2)
"""As measured: 8192 x 8192 x 8192 in bfloat16 for as long as the card stays warm, and a copy."""


def job(*words: str, device: str = "h100", preset_name: str = "llama-8b") -> PlannedJob:
    config = load_config(None, (f"--preset={preset_name}", *words))
    return PlannedJob.from_config(config, preset_cluster(device, Layout.from_config(config.layout).ranks))


def test_products_take_what_they_were_measured_to() -> None:
    """261 shapes on one H200, of which one set the rate; those that no model needs, under 4 GFLOP, are not compared."""
    with (Path(__file__).parent / "h200_products.csv").open() as file:
        measured = [[float(cell) for cell in row.values()] for row in DictReader(file)]
    shapes = [(int(m), int(n), int(k), us * 1e-6) for m, n, k, us in measured if 2 * m * n * k > 4e9]
    errors = sorted(abs(matmul_time(H200, m, n, k) / seconds - 1) for m, n, k, seconds in shapes)
    assert len(errors) > 200
    assert median(errors) < 0.08
    assert errors[int(0.9 * len(errors))] < 0.3


def test_rows_that_begin_anywhere_are_slow() -> None:
    assert matmul_time(H200, 8192, 4100, 4096) > 2.5 * matmul_time(H200, 8192, 4096, 4096)
    assert matmul_time(H200, 8192, 4097, 4096) > 2 * matmul_time(H200, 8192, 4100, 4096)
    assert matmul_time(H200, 8192, 4104, 4096) < 1.1 * matmul_time(H200, 8192, 4096, 4096)


def test_a_wave_that_is_not_full_costs_a_whole_one() -> None:
    full = matmul_time(H200, 256 * 12, 128 * 11, 4096)
    assert matmul_time(H200, 256 * 12, 128 * 11 + 8, 4096) > 1.3 * full


def test_groups_stand_where_the_order_of_axes_puts_them() -> None:
    assert group_placement(8, 8, 1) == GroupPlacement(8, 8)
    assert group_placement(8, 8, 8) == GroupPlacement(8, 1)
    assert group_placement(8, 16, 4) == GroupPlacement(16, 2)
    assert group_placement(8, 64, 1).nodes == 8


def test_a_group_of_whole_nodes_drives_all_their_adapters() -> None:
    cluster = preset_cluster("h100", 64)
    alone = collective_seconds(cluster, "all_reduce", 1e9, GroupPlacement(8, 1))
    together = collective_seconds(cluster, "all_reduce", 1e9, GroupPlacement(64, 8))
    assert 5 < alone / together < 9


def test_a_measured_curve_takes_the_place_of_latency_and_bandwidth() -> None:
    """Points of eight H200 on one node: bytes of an all-reduce, and bytes a second on the bus."""
    curve = ((2.0**20, 39.93e9), (2.0**24, 219.89e9), (2.0**28, 436.15e9), (2.0**34, 482.26e9))
    cluster = replace(preset_cluster("h200", 8), intra_node=Link(450e9, 3e-6, curve))
    for size, rate in curve:
        assert isclose(
            collective_seconds(cluster, "all_reduce", size, GroupPlacement(8, 8)), 1.75 * size / rate, rel_tol=1e-6
        )
    between = collective_seconds(cluster, "all_reduce", 2.0**22, GroupPlacement(8, 8))
    assert 1.75 * 2**22 / 219.89e9 < between < 1.75 * 2**22 / 39.93e9


LAYOUTS = {
    "ddp": ("--layout.replicate=8",),
    "shard parameters": ("--layout.replicate=8", "--layout.shard=parameters"),
    "shard optimizer": ("--layout.replicate=8", "--layout.shard=optimizer"),
    "shard gradients": ("--layout.replicate=8", "--layout.shard=gradients"),
    "hybrid shard": ("--layout.replicate=2", "--layout.shard_degree=4", "--layout.shard=parameters"),
    "tensor": ("--layout.replicate=2", "--layout.tensor=4"),
    "ring": ("--layout.replicate=2", "--layout.context=4", "--layout.shard=parameters"),
    "all-to-all": ("--layout.replicate=2", "--layout.context=4", "--context.method=all-to-all"),
    "pipeline": ("--layout.replicate=2", "--layout.pipeline=4"),
    "pipeline and shards": ("--layout.replicate=2", "--layout.pipeline=4", "--layout.shard=parameters"),
    "experts": ("--preset=mixtral-8x7b", "--layout.replicate=8", "--layout.shard=parameters", "--layout.expert=8"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_that_are_timed_are_those_that_are_sent(name: str) -> None:
    """Against the exact count; what is left out is the ends of the model and a float32 embedding."""
    config = load_config(None, ("--preset=llama-8b", *LAYOUTS[name], "--batch.global=64", "--batch.micro=2"))
    layout = Layout.from_config(config.layout)
    timed: Counter[str] = Counter()
    for call in estimate(PlannedJob.from_config(config, preset_cluster("h100", 8))).calls:
        timed[call.axis.split("+")[0]] += int(call.message_bytes * call.calls)
    sent: Counter[str] = Counter()
    for row in comm_volume(config, layout, derive_batch(config.batch, layout.data_degree), layout.ranks // 2):
        sent[row.axis.split("+")[0]] += row.message_bytes
    del sent["control"]
    sent["shard"] += sent.pop("expert_shard", 0)
    for axis, message in sent.items():
        if message:
            assert isclose(timed[axis], message, rel_tol=0.08), axis


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_the_closed_form_of_a_bubble_is_near_the_schedule_run_pass_by_pass(kind: str) -> None:
    for ranks, micros in ((2, 8), (4, 16), (8, 32)):
        words = (f"--layout.pipeline={ranks}", f"--batch.global={micros}", "--batch.micro=1", "--layout.replicate=1")
        piped = job(*words, f"--pipeline.schedule={kind}")
        closed, run = estimate(piped), estimate(piped, simulate_pipeline=True)
        assert isclose(closed.seconds, run.seconds, rel_tol=0.06)


def test_phases_add_up_and_the_interval_holds_them() -> None:
    found = estimate(job("--layout.replicate=8", "--layout.shard=parameters", "--batch.micro=1"))
    assert isclose(found.seconds, sum(found.phases.values()))
    assert found.interval_low < found.seconds < found.interval_high
    assert found.main_uncertainty
    assert 0.2 < found.mfu <= found.hfu < 0.8


def test_recomputation_costs_the_blocks_forward_once_more() -> None:
    words = ("--layout.replicate=8", "--layout.shard=parameters", "--batch.micro=1")
    plain, full = (estimate(job(*words, f"--activation_checkpoint.mode={kind}")) for kind in ("none", "full"))
    assert 1.2 < full.seconds / plain.seconds < 1.36
    assert full.mfu < plain.mfu
    assert isclose(full.model_flops, plain.model_flops)
    assert 1.25 < full.hardware_flops / full.model_flops < 1.34


def test_more_micro_batches_shrink_the_bubble() -> None:
    few, many = (
        estimate(job("--layout.pipeline=8", "--layout.replicate=1", f"--batch.global={n}", "--batch.micro=1"))
        for n in (8, 64)
    )
    assert few.phases["bubble"] / few.seconds > 3 * many.phases["bubble"] / many.seconds


def test_slower_links_never_help() -> None:
    fast = job("--layout.replicate=64", "--layout.shard=parameters", "--batch.global=64")
    slow = replace(fast, cluster=replace(fast.cluster, inter_node=Link(5e9, 1e-5)))
    assert estimate(slow).seconds > 1.5 * estimate(fast).seconds


def test_head_and_embedding_are_not_recomputed() -> None:
    """`recompute` is in seconds of a layer that activation checkpointing repeats; head and embedding have none."""
    shape = layer_shape(job("--layout.replicate=8", "--activation_checkpoint.mode=full"))
    assert head_time(shape).recompute == 0
    assert embedding_time(shape).recompute == 0
    layer = layer_time(shape, False)
    assert layer.recompute == layer.forward < 1


def test_unknown_schedule_is_an_error_and_has_no_default_bubble() -> None:
    piped = job("--layout.pipeline=4", "--batch.global=16", "--batch.micro=1", "--layout.replicate=1")
    with pytest.raises(ConfigError, match="expected one of gpipe, 1f1b"):
        estimate(replace(piped, schedule="2f2b"))
