"""Attention unlike that of Llama: windows of models that Meshwright trains, capped scores, latent attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.models.architecture import Architecture, LatentAttention
from meshwright.base.models.block_kinds import BlockKind
from meshwright.base.models.registry import model_architecture
from meshwright.base.topology.layout import Layout
from meshwright.core.models.layers.chunked_attention import QUERIES
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.step_flops import step_flops
from meshwright.planner.cost.terms.layer_time import CHUNK_QUERIES, attention_time, layer_shape
from meshwright.planner.cost.trace.activation_messages import ActivationMessages
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import MEGATRON_2024
from tests.kit.small_run import load_cpu_config

SEQUENCE = 16_384


def run_job(*options: str) -> PlannedJob:
    fixed = ("--preset=llama-1b", f"--data.sequence={SEQUENCE}", "--batch.global=1", "--layout.replicate=1")
    config = load_cpu_config(None, (*fixed, *options))
    return PlannedJob.from_config(config, preset_cluster("h200", 1))


def test_every_layer_of_mistral_has_its_window() -> None:
    full, windowed = run_job("--model.family=mistral"), run_job("--model.family=mistral", "--model.options.window=1024")
    model = windowed.model
    assert isinstance(model, Architecture)
    assert set(model.kind_counts) == {BlockKind("window")}
    pairs = 1024 - 1024**2 / (2 * SEQUENCE)  # the keys of a query in the mean
    attention = 3 * 2 * SEQUENCE * model.layers * model.attention_width
    difference = step_flops(full.model, full).model - step_flops(model, windowed).model
    assert difference == pytest.approx(attention * (SEQUENCE / 2 - pairs))
    assert estimate(windowed).phases["forward"] < 0.9 * estimate(full).phases["forward"]
    assert estimate(windowed).peak_memory.activations == estimate(full).peak_memory.activations


def test_window_as_long_as_the_sequence_changes_nothing() -> None:
    full = run_job("--model.family=mistral")
    windowed = run_job("--model.family=mistral", f"--model.options.window={SEQUENCE}")
    assert estimate(windowed).phases == estimate(full).phases


def test_every_second_layer_of_gemma2_has_its_window() -> None:
    config = load_cpu_config(
        None, ("--model.family=gemma2", "--model.tie=true", "--model.layers=5", "--model.options.window=64")
    )
    model = model_architecture(config.model, "gemma2")
    assert [kind.mixer for kind in model.layer_kinds] == ["window", "attention", "window", "attention", "window"]
    assert model.sliding_window == 64


def test_capped_scores_are_computed_by_chunks_that_leave_out_unseen_keys() -> None:
    assert CHUNK_QUERIES == QUERIES
    job = run_job("--model.family=gemma2", "--model.tie=true", "--model.options.window=512")
    shape = layer_shape(job)
    assert isinstance(job.model, Architecture)
    full, window = (attention_time(job.model, shape, BlockKind(mixer)) for mixer in ("attention", "window"))
    assert window[0] < 0.12 * full[0]
    assert window[1] < 0.12 * full[1]


def latent_job(layout: Layout, method: str) -> PlannedJob:
    model = Architecture(
        "latent", 4, 2048, 16, 16, 192, 8192, 32_000, latent_attention=LatentAttention(0, 512, 128, 64, 128)
    )
    cluster, batch = preset_cluster("h100", layout.ranks), Batch(1, 1, 1, 1)
    job = PlannedJob(model, cluster, layout, batch, SEQUENCE, trainer=MEGATRON_2024, context_method=method)
    return replace(job, sharding="none")


@pytest.mark.parametrize("tensor", [1, 2])
def test_context_parallel_ranks_exchange_projected_keys_and_values_of_their_heads(tensor: int) -> None:
    """Attention gets keys of 192 and values of 128 for each of 16 heads, which the tensor axis divides."""
    for method, sent in (("ring", 1), ("gather", 4)):
        job = latent_job(Layout(1, 1, 1, 4, tensor, 1), method)
        message = ActivationMessages(job, layer_shape(job)).context(1.0).forward[0]
        assert message.message_bytes == sent * SEQUENCE // 4 * (16 // tensor) * (192 + 128) * 2
