"""Costs of a device: power limits, recipes of 8-bit matmuls, and optimizer state in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.hardware.cluster import NODE_TYPES, preset_cluster
from meshwright.base.hardware.power import power_limited_fraction
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.terms.float8_recipe import FLOAT8_RECIPES
from meshwright.planner.cost.terms.offload_time import offload_seconds
from meshwright.planner.search.candidate import Candidate, candidate_job, exact_job
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload_args import build_workload, for_trainer
from tests.kit.small_run import load_cpu_config
from tests.planner.planned_cases import cost_cache


def llama_job(*options: str, device: str = "h100") -> PlannedJob:
    config = load_cpu_config(None, ("--preset=llama-8b", "--layout.replicate=8", "--layout.shard=parameters", *options))
    return PlannedJob.from_config(config, preset_cluster(device, 8))


def test_sustained_rates_of_an_h200_are_those_measured_under_its_power_limit() -> None:
    device = NODE_TYPES["h200"].device
    assert device.peak_flops["bf16"] * device.sustained_fraction["bf16"] == pytest.approx(671e12, rel=0.03)
    assert device.peak_flops["fp8"] * device.sustained_fraction["fp8"] == pytest.approx(1314e12, rel=0.03)


def test_a_power_limit_lowers_the_rate_less_than_the_power() -> None:
    assert power_limited_fraction(0.66, 500, 700) == pytest.approx(0.52, rel=0.01)
    assert power_limited_fraction(0.66, 900, 700) == 0.66
    assert power_limited_fraction(0.66, 500, 0) == 0.66
    lower, full = (NODE_TYPES[name].device.sustained_fraction for name in ("h100-500w", "h100"))
    law = power_limited_fraction(1.0, 500, 700)
    assert lower["bf16"] / full["bf16"] == pytest.approx(law, rel=0.01)
    assert lower["fp8"] / full["fp8"] == pytest.approx(law, rel=0.06)
    limited = NODE_TYPES["h100"].device.with_power_limit(500)
    assert limited.power == 500
    assert limited.sustained_fraction["fp8"] < NODE_TYPES["h100"].device.sustained_fraction["fp8"]


def test_every_known_gpu_has_a_power_and_a_host_link() -> None:
    assert all(node.device.power > 0 and node.device.host_bandwidth > 0 for node in NODE_TYPES.values())


def test_a_gpu_without_matrix_units_for_bf16_is_planned_in_fp16(tmp_path: Path) -> None:
    """A V100: the preset's bf16 is replaced, and one that is asked for is not; the plan says both."""
    v100, h100 = preset_cluster("v100-32", 8), preset_cluster("h100", 8)
    assert (v100.device.half_precision, h100.device.half_precision) == ("fp16", "bf16")
    work = build_workload("llama-1b").on(v100)
    assert work.base_config is not None
    assert (work.precision, work.base_config.precision.compute) == ("fp16", "fp16")
    assert "v100-32 multiplies bf16 at 15.7 TFLOP/s and fp16 at 125: planned in fp16" in work.notes
    assert work.on(v100).notes == work.notes
    for given in (build_workload("llama-1b", precision="bf16"), build_workload("llama-1b", ["precision.compute=bf16"])):
        assert given.on(v100).precision == "bf16"
        assert given.on(v100).notes[0].endswith("try --precision fp16")
    run_file = tmp_path / "run.toml"
    run_file.write_text('preset = "llama-1b"\nprecision.loss_scale = 1024\n')
    scaled = build_workload("llama-1b", ["--precision.loss_scale=1024"])
    assert [work.on(v100).precision for work in (scaled, build_workload(str(run_file)))] == ["fp16", "fp16"]
    for needs_bf16 in ("--precision.weights=bf16", "--precision.residual=bf16", "--precision.float8=true"):
        assert build_workload("llama-1b", [needs_bf16]).on(v100).precision == "bf16"
    assert for_trainer(build_workload("llama-1b"), "megatron").on(v100).precision == "fp16"
    assert (build_workload("llama-1b").on(h100).precision, build_workload("llama-1b").on(h100).notes) == ("bf16", ())


def test_rowwise_casts_cost_more_than_tensorwise_ones() -> None:
    job = replace(llama_job(), precision="fp8")
    seconds = {
        recipe: estimate(replace(job, trainer=replace(job.trainer, float8_recipe=recipe))).seconds  # type: ignore[arg-type]
        for recipe in FLOAT8_RECIPES
    }
    assert seconds["tensorwise"] < min(seconds["blockwise"], seconds["rowwise"])


def test_offloaded_update_takes_the_transfers_and_the_host_update() -> None:
    assert offload_seconds(1e9, 4, 4, 50e9) == pytest.approx((8 + 28) / 50)
    on_device, offloaded = estimate(llama_job()), estimate(llama_job("--optimizer.cpu_offload=true"))
    assert offloaded.peak_memory.optimizer == 0 < on_device.peak_memory.optimizer
    assert offloaded.phases["update"] > 5 * on_device.phases["update"]


def test_offload_is_counted_for_a_candidate_of_the_search() -> None:
    """A candidate has no run configuration, so that offloading is a property of its trainer."""
    sizes = ("--model.ffn=11008", "--model.vocab=32000", "--model.kv_heads=32")
    cache = cost_cache("llama-8b", "a100-40:2", *sizes, "--optimizer.cpu_offload=true")
    candidate = Candidate(Layout(1, 1, 2, 1, 1, 1), 1, "parameters", "full", offload=True)
    job, exact = (build(cache.work, cache.cluster, candidate) for build in (candidate_job, exact_job))
    assert job.run_config is None
    assert estimate(job).peak_memory.optimizer == estimate(exact).peak_memory.optimizer == 0
    assert estimate(job).fits


def test_selective_policies_trade_memory_for_time() -> None:
    job = llama_job("--activation_checkpoint.mode=selective", "--batch.global=64", "--batch.micro=4")
    estimates = {
        policy: estimate(replace(job, trainer=replace(job.trainer, selective_policy=policy)))  # type: ignore[arg-type]
        for policy in ("alternate_matmuls", "matmuls", "all_but_pointwise")
    }
    memory = {policy: one.peak_memory.activations for policy, one in estimates.items()}
    full = estimate(replace(job, activation_checkpoint="none")).peak_memory.activations
    assert memory["alternate_matmuls"] < memory["matmuls"] < memory["all_but_pointwise"] < full
    assert estimates["all_but_pointwise"].phases["recompute"] < estimates["alternate_matmuls"].phases["recompute"]
