"""FLOPs of a step: the matrix products that the time model runs are those that are counted, with recomputation."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.peak_memory import activation_settings
from meshwright.planner.cost.step_flops import step_flops
from meshwright.planner.cost.terms.activations import kind_activations
from meshwright.planner.cost.terms.layer_matmuls import expert_matmuls, feed_forward_matmuls, mixer_projections
from meshwright.planner.cost.terms.layer_time import kind_time, layer_shape
from meshwright.planner.cost.terms.recomputation import SELECTIVE
from meshwright.planner.workload.huggingface_config import parse_huggingface_config
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import HAI_LLM, MEGATRON_2022, MESHWRIGHT
from tests.kit.small_run import load_cpu_config

CONFIGS = json.loads((Path(__file__).parent / "huggingface_configs.json").read_text())
SINGLE = Layout(1, 1, 1, 1, 1, 1)


def architecture(name: str) -> Architecture:
    return parse_huggingface_config(CONFIGS[name]["config"], "config.json").architecture


def job(model: Architecture, layout: Layout = SINGLE, **changes) -> PlannedJob:
    return replace(PlannedJob(model, preset_cluster("h200", 1), layout, Batch(1, 1, 1, 1), 4096), **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_matrix_products_of_every_layer_are_those_of_its_active_parameters(name: str) -> None:
    """Biases are no products: those of experts are counted as parameters of matrices."""
    model = architecture(name)
    shape = layer_shape(job(model))
    for kind in model.kind_counts:
        products = mixer_projections(model, shape, kind)
        if kind.ffn != "none":
            products += feed_forward_matmuls(model, shape, kind) + expert_matmuls(model, shape, kind)
        flops = sum(2 * rows * columns * inner * count for rows, columns, inner, count in products)
        assert isclose(flops, 2 * shape.tokens * model.active_kind_parameters(kind), rel_tol=0.025), kind


def test_gate_of_attention_takes_time_and_memory() -> None:
    model = architecture("qwen3-next")
    plain, attention = replace(model, attention_gate=False), BlockKind("attention", "none")
    gate = model.heads * model.head_dim
    with_gate, without = (kind_time(each, layer_shape(job(each)), attention) for each in (model, plain))
    device = preset_cluster("h200", 1).device
    product = 2 * 4096 * model.width * gate / device.peak_flops["bf16"]
    assert with_gate.forward - without.forward > product
    assert with_gate.backward - without.backward > 2 * product
    settings = replace(activation_settings(job(model)), autocast=False)  # without copies of the weights
    saved, less = (kind_activations(each, settings, attention).saved for each in (model, plain))
    assert saved - less == 2 * 4096 * gate * 2  # the gate and the gated output in bf16


@pytest.mark.parametrize("policy", SELECTIVE)
def test_recomputed_flops_are_those_of_the_policy(policy: str) -> None:
    model = architecture("llama-3-8b")
    trainer = replace(MESHWRIGHT, selective_policy=policy)
    tokens, blocks = 4096, 32 * model.active_matrix_parameters(0)
    attention = 2.0 * tokens * 4096 * 32 * 2 * model.attention_width / 2 / 2
    recomputed = step_flops(model, job(model, activation_checkpoint="selective", trainer=trainer)).recomputed
    expected = {"alternate_matmuls": tokens * blocks, "all_but_scores": attention}
    assert isclose(recomputed, expected.get(policy, 0.0))
    assert isclose(
        step_flops(model, job(model, activation_checkpoint="full")).recomputed, 2 * tokens * blocks + attention
    )


def test_hardware_utilization_counts_selective_recomputation_of_a_run() -> None:
    config = load_cpu_config(None, ("--preset=llama-8b", "--activation_checkpoint.mode=selective"))
    run = estimate(PlannedJob.from_config(config, preset_cluster("h200", 1)))
    model = run.job.model
    assert isinstance(model, Architecture)
    forward = 2.0 * run.job.tokens_per_step * 32 * model.active_matrix_parameters(0)
    assert isclose(run.hardware_flops - run.model_flops, forward / 2)
    assert run.hfu > 1.1 * run.mfu


def test_latent_projections_that_are_not_saved_are_counted_once() -> None:
    model = architecture("deepseek-v3")
    mla = model.latent_attention
    assert mla is not None
    up = 128 * (mla.q_lora_rank * 192 + mla.kv_lora_rank * 256)
    assert up == mla.up_projections(model.heads)
    none, full = (
        step_flops(model, job(model, activation_checkpoint=mode, trainer=HAI_LLM)) for mode in ("none", "full")
    )
    assert isclose(none.recomputed, 2.0 * 4096 * 61 * up)
    ordinary = step_flops(model, job(model, activation_checkpoint="full", trainer=MEGATRON_2022))
    assert full.recomputed == ordinary.recomputed
