"""Step time follows from matmul shapes, links, overlap and the pipeline schedule."""

from __future__ import annotations

from collections import Counter
from csv import DictReader
from dataclasses import replace
from math import isclose
from pathlib import Path
from statistics import median

import pytest

from meshwright.base.config import config_from_dict, derive_batch
from meshwright.base.hardware.cluster import Link, preset_cluster
from meshwright.base.hardware.links import GroupPlacement, collective_seconds, group_placement
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.terms.kernel_time import KernelRate, matmul_time
from meshwright.planner.cost.terms.layer_time import embedding_time, head_time, layer_shape, layer_time
from meshwright.planner.workload.planned_job import PlannedJob
from tests.kit.small_run import load_cpu_config

H200 = KernelRate(683e12, 4.1e12, 132, 2)
"""As measured: a bf16 matmul of 8192 x 8192 x 8192, sustained until the card is warm, and a device copy."""


def job(*options: str, device: str = "h100", preset_name: str = "llama-8b") -> PlannedJob:
    config = load_cpu_config(None, (f"--preset={preset_name}", *options))
    return PlannedJob.from_config(config, preset_cluster(device, Layout.from_config(config.layout).ranks))


def test_matmul_time_agrees_with_measured_matmuls() -> None:
    """261 shapes on one H200, one of which sets the rate. Shapes under 4 GFLOP, which no model needs, are left out."""
    with (Path(__file__).parent / "h200_matmuls.csv").open() as file:
        measured = [[float(cell) for cell in row.values()] for row in DictReader(file)]
    shapes = [(int(m), int(n), int(k), us * 1e-6) for m, n, k, us in measured if 2 * m * n * k > 4e9]
    errors = sorted(abs(matmul_time(H200, m, n, k) / seconds - 1) for m, n, k, seconds in shapes)
    assert len(errors) > 200
    assert median(errors) < 0.08
    assert errors[int(0.9 * len(errors))] < 0.3


def test_misaligned_matmuls_are_slow() -> None:
    assert matmul_time(H200, 8192, 4100, 4096) > 2.5 * matmul_time(H200, 8192, 4096, 4096)
    assert matmul_time(H200, 8192, 4097, 4096) > 2 * matmul_time(H200, 8192, 4100, 4096)
    assert matmul_time(H200, 8192, 4104, 4096) < 1.1 * matmul_time(H200, 8192, 4096, 4096)


def test_wave_quantization_of_matmuls() -> None:
    full = matmul_time(H200, 256 * 12, 128 * 11, 4096)
    assert matmul_time(H200, 256 * 12, 128 * 11 + 8, 4096) > 1.3 * full


def test_group_placement_follows_the_order_of_axes() -> None:
    assert group_placement(8, 8, 1) == GroupPlacement(8, 8)
    assert group_placement(8, 8, 8) == GroupPlacement(8, 1)
    assert group_placement(8, 16, 4) == GroupPlacement(16, 2)
    assert group_placement(8, 64, 1).nodes == 8


def test_collective_over_full_nodes_uses_all_network_adapters() -> None:
    cluster = preset_cluster("h100", 64)
    alone = collective_seconds(cluster, "all_reduce", 1e9, GroupPlacement(8, 1))
    together = collective_seconds(cluster, "all_reduce", 1e9, GroupPlacement(64, 8))
    assert 5 < alone / together < 9


def test_measured_bandwidth_curve_replaces_latency_and_bandwidth() -> None:
    """Points of eight H200 on one node: bytes of an all-reduce, and bus bandwidth in bytes per second."""
    curve = ((2.0**20, 39.93e9), (2.0**24, 219.89e9), (2.0**28, 436.15e9), (2.0**34, 482.26e9))
    cluster = replace(preset_cluster("h200", 8), intra_node=Link(450e9, 3e-6, curve))
    for size, rate in curve:
        assert isclose(
            collective_seconds(cluster, "all_reduce", size, GroupPlacement(8, 8)), 1.75 * size / rate, rel_tol=1e-6
        )
    between = collective_seconds(cluster, "all_reduce", 2.0**22, GroupPlacement(8, 8))
    assert 1.75 * 2**22 / 219.89e9 < between < 1.75 * 2**22 / 39.93e9


LAYOUTS = {
    "DDP": ("--layout.replicate=8",),
    "DDP with a communication hook": ("--layout.replicate=8", "--ddp.comm_hook=bf16_compress"),
    "shard parameters": ("--layout.replicate=8", "--layout.shard=parameters"),
    "shard optimizer": ("--layout.replicate=8", "--layout.shard=optimizer"),
    "shard gradients": ("--layout.replicate=8", "--layout.shard=gradients"),
    "hybrid shard": ("--layout.replicate=2", "--layout.shard_degree=4", "--layout.shard=parameters"),
    "tensor": ("--layout.replicate=2", "--layout.tensor=4"),
    "ring": ("--layout.replicate=2", "--layout.context=4", "--layout.shard=parameters"),
    "all-to-all": ("--layout.replicate=2", "--layout.context=4", "--context.method=all-to-all"),
    "pipeline": ("--layout.replicate=2", "--layout.pipeline=4"),
    "pipeline and FSDP": ("--layout.replicate=2", "--layout.pipeline=4", "--layout.shard=parameters"),
    "expert parallel": (
        "--preset=mixtral-8x7b",
        "--layout.replicate=8",
        "--layout.shard=parameters",
        "--layout.expert=8",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_timed_message_bytes_agree_with_the_exact_volume(name: str) -> None:
    """Within 8 %: the time model leaves out the embedding, the head, and the float32 output of the embedding."""
    config = load_cpu_config(None, ("--preset=llama-8b", *LAYOUTS[name], "--batch.global=64", "--batch.micro=2"))
    layout = Layout.from_config(config.layout)
    predicted: Counter[str] = Counter()
    for call in estimate(PlannedJob.from_config(config, preset_cluster("h100", 8))).calls:
        predicted[call.axis.split("+")[0]] += int(call.message_bytes * call.calls)
    exact: Counter[str] = Counter()
    for row in comm_volume(config, layout, derive_batch(config.batch, layout.data_degree), layout.ranks // 2):
        exact[row.axis.split("+")[0]] += row.message_bytes
    del exact["control"]
    exact["shard"] += exact.pop("expert_shard", 0)
    for axis, message in exact.items():
        if message:
            assert isclose(predicted[axis], message, rel_tol=0.08), axis


@pytest.mark.parametrize("kind", SCHEDULES)
def test_closed_form_bubble_agrees_with_the_executed_schedule(kind: str) -> None:
    for ranks, micro_batches in ((2, 8), (4, 16), (8, 32)):
        options = (
            f"--layout.pipeline={ranks}",
            f"--batch.global={micro_batches}",
            "--batch.micro=1",
            "--layout.replicate=1",
        )
        piped = job(*options, f"--pipeline.schedule={kind}")
        closed_form, executed = estimate(piped), estimate(piped, simulate_pipeline=True)
        assert isclose(closed_form.seconds, executed.seconds, rel_tol=0.06)


def test_phases_add_up_to_the_step_time_inside_its_interval() -> None:
    estimated = estimate(job("--layout.replicate=8", "--layout.shard=parameters", "--batch.micro=1"))
    assert isclose(estimated.seconds, sum(estimated.phases.values()))
    assert estimated.interval_low < estimated.seconds < estimated.interval_high
    assert estimated.main_uncertainty
    assert 0.2 < estimated.mfu <= estimated.hfu < 0.8


def test_full_activation_checkpointing_repeats_the_forward_of_blocks() -> None:
    options = ("--layout.replicate=8", "--layout.shard=parameters", "--batch.micro=1")
    plain, full = (estimate(job(*options, f"--activation_checkpoint.mode={kind}")) for kind in ("none", "full"))
    assert 1.2 < full.seconds / plain.seconds < 1.36
    assert full.mfu < plain.mfu
    assert isclose(full.model_flops, plain.model_flops)
    assert 1.25 < full.hardware_flops / full.model_flops < 1.34


def test_more_micro_batches_reduce_the_bubble() -> None:
    few, many = (
        estimate(job("--layout.pipeline=8", "--layout.replicate=1", f"--batch.global={n}", "--batch.micro=1"))
        for n in (8, 64)
    )
    assert few.phases["bubble"] / few.seconds > 3 * many.phases["bubble"] / many.seconds


def test_slower_links_increase_the_step_time() -> None:
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


def residual_jobs(model: dict[str, object], micro: int, sequence: int) -> list[PlannedJob]:
    """A run on one H200 with a residual stream in bf16, and the same in float32."""
    run = {
        "model": model,
        "layout": {"replicate": 1},
        "batch": {"global": micro, "micro": micro},
        "data": {"sequence": sequence},
    }
    return [
        PlannedJob.from_config(
            config_from_dict({**run, "precision": {"residual": residual}}), preset_cluster("h200", 1)
        )
        for residual in ("bf16", "fp32")
    ]


def test_float32_residual_stream_costs_what_was_measured() -> None:
    """4.4 ms per step of a Llama of 1.2B parameters: 257.6 and 253.2 ms in turns on one H200 (docs/speed.md)."""
    llama = {"vocab": 128256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "tie": True}
    bf16, fp32 = (estimate(job).seconds for job in residual_jobs(llama, 4, 4096))
    assert fp32 - bf16 == pytest.approx(4.4e-3, abs=0.3e-3)


def test_float32_residual_stream_costs_a_small_model_no_constant_time() -> None:
    small = {"vocab": 512, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
    bf16, fp32 = (estimate(job) for job in residual_jobs(small, 2, 32))
    assert fp32.phases["other"] == bf16.phases["other"]
    assert bf16.seconds <= fp32.seconds < 1.01 * bf16.seconds
