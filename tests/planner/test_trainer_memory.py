"""Memory of the trainers of Llama 3 and DeepSeek-V3, by hand from what their papers state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.setups import SETUPS, workload
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.peak_memory import activation_settings, rank_traces
from meshwright.planner.cost.terms.activations import block_activations
from meshwright.planner.cost.terms.layer_time import layer_shape, layer_time
from meshwright.planner.cost.trace.operations import GRADIENTS
from meshwright.planner.cost.trace.pass_memory import MemoryWalk
from meshwright.planner.search.candidate import candidate_job
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import HAI_LLM, MEGATRON_2024, in_16_bits
from meshwright.planner.workload.workload_args import build_workload, for_trainer

MIB = 2**20


def published_job(name: str) -> PlannedJob:
    setup = next(setup for setup in SETUPS if setup.name.startswith(name))
    cluster = resolve_cluster(setup.cluster)
    return candidate_job(workload(setup).on(cluster), cluster, setup.layout)


def saved_bytes(job: PlannedJob, moe: bool = False) -> float:
    return block_activations(job.model, activation_settings(job), moe).saved


def test_a_block_of_llama_3_saves_what_the_formula_says() -> None:
    """s b / t (8 h + 2 d (a + 2 k) + 2 a d + 6 f), the log-sum-exp and the normalizers; 4 f without the product."""
    job, tokens, width, ffn, heads = published_job("Llama 3 405B"), 8192 / 8, 16384, 53248, 128
    attention = 8 * width + 2 * 128 * (heads + 2 * 8) + 2 * heads * 128
    small = 4 * 8192 * heads / 8 + 8 * tokens
    assert saved_bytes(job) == tokens * (attention + 4 * ffn) + small
    assert saved_bytes(replace(job, trainer=MEGATRON_2024)) == tokens * (attention + 6 * ffn) + small


def test_llama_3_fits_without_activation_checkpointing() -> None:
    """All 16 micro-batches of 8 layers are in flight, and the gradients of one layer of 126 exist at the peak."""
    job = published_job("Llama 3 405B")
    memory = estimate(job).peak_memory
    assert memory.activations == pytest.approx(16 * 8 * saved_bytes(job), rel=0.01)
    assert memory.gradients == pytest.approx(4 * 405e9 / 126 / 8, rel=0.05)
    assert memory.total < 0.92 * job.cluster.device.memory


def test_gradients_of_zero_2_in_a_pipeline_are_sharded_after_the_last_backward_pass() -> None:
    job = replace(published_job("Llama 3 405B"), sharding="gradients")
    buffers = estimate(replace(job, sharding="optimizer"))
    sharded = estimate(job)
    assert sharded.peak_memory.gradients < 0.2 * buffers.peak_memory.gradients
    assert sharded.seconds == buffers.seconds
    trace = rank_traces(job)[1]
    walk = MemoryWalk()
    walk.run(trace.walk())
    assert walk.state[GRADIENTS] == pytest.approx(trace.updated * job.trainer.gradient_bytes)
    assert walk.peak_gradients < buffers.peak_memory.gradients


def test_a_block_of_deepseek_saves_what_the_paper_says() -> None:
    """Per token: inputs of both norms, latents with the rotary key, the output of attention in 12 bits, log-sum-exp,
    8-bit copies for eight experts, and the 8-bit inputs of SwiGLU of eight experts and the shared one.
    """
    job, width, active, ffn = published_job("DeepSeek"), 7168, 8, 2048
    latents, attention = 2 * (1536 + 512 + 64), 1.5 * 128 * 128 + 4 * 128
    experts = active * (width + 2 * ffn) + 2 * ffn
    routing = active * 20 + 2 * 256 * 4
    assert saved_bytes(job, moe=True) == 4096 * (2 * 2 * width + 8 + latents + attention + experts + routing)


def test_deepseek_fits_with_the_recomputation_of_its_paper() -> None:
    job = published_job("DeepSeek")
    assert job.activation_checkpoint == "selective"
    assert estimate(job).peak_memory.total < 0.92 * job.cluster.device.memory


def test_weight_gradients_that_wait_keep_their_operands_only() -> None:
    job = published_job("DeepSeek")
    whole_graph = replace(job, trainer=replace(job.trainer, defers_matmuls_only=False))
    blocks = [block_activations(each.model, activation_settings(each), True) for each in (job, whole_graph)]
    assert blocks[0].saved == blocks[1].saved
    assert blocks[0].deferred < 0.5 * blocks[1].deferred
    assert estimate(job).peak_memory.activations < 0.7 * estimate(whole_graph).peak_memory.activations


def test_recomputing_norms_and_activations_does_not_permute_tokens_again() -> None:
    job = published_job("DeepSeek")
    pointwise, matmuls = (
        layer_time(layer_shape(replace(job, trainer=replace(job.trainer, selective_policy=policy))), True).recompute  # type: ignore[arg-type]
        for policy in ("all_but_pointwise", "matmuls")
    )
    assert pointwise < 0.8 * matmuls


def test_fewer_bits_on_the_wire_shorten_the_dispatch() -> None:
    job = published_job("DeepSeek")
    exposed = replace(job.trainer, expert_overlap=0.0)
    eight, sixteen = (
        estimate(replace(job, trainer=replace(exposed, dispatch_bytes=size))).phases["expert"] for size in (1, 0)
    )
    assert eight == pytest.approx(0.75 * sixteen, rel=0.05)


def test_a_trainer_of_8_bits_saves_16_bits_if_its_matmuls_do() -> None:
    work = build_workload("mixtral-8x7b", (), 64, 4096)
    assert for_trainer(work, "hai-llm").trainer == in_16_bits(HAI_LLM) != HAI_LLM
    assert for_trainer(replace(work, precision="fp8"), "hai-llm").trainer == HAI_LLM
    assert in_16_bits(MEGATRON_2024) is MEGATRON_2024
