"""Hybrid models are planned by the kinds of their layers: parameters, FLOPs, time and memory."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from typing import Any

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind, LinearAttention, StateSpace, attended_tokens
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.step_time import step_flops
from meshwright.planner.cost.terms.layer_time import kind_time, layer_shape
from meshwright.planner.workload.huggingface_config import parse_huggingface_config
from meshwright.planner.workload.planned_job import PlannedJob

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "sliding_window": 128,
    "num_local_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "sliding_window": 512,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attention_head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
NEMOTRON_MOE = NEMOTRON | {
    "hidden_size": 2688, "num_key_value_heads": 2, "intermediate_size": 1856, "mamba_num_heads": 64,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 65536, "num_experts": 16,
    "num_experts_per_tok": 2, "mamba_dt_rank": 256,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def read(config: dict[str, Any]) -> Architecture:
    return parse_huggingface_config(config, "config.json").architecture


def job(model: Architecture, sequence: int = 8192, layout: Layout | None = None, **changes: Any) -> PlannedJob:
    layout = layout or Layout(1, 1, 8, 1, 1, 1)
    batch = Batch(64, 1, layout.data_degree, 64 // layout.data_degree)
    planned = PlannedJob(model, preset_cluster("h200", 8), layout, batch, sequence, "parameters")
    return replace(planned, **changes)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (GEMMA, 0.999885952e9, 0.999885952e9),
        (GPT_OSS, 116.83e9, 5.71e9),
        (NEMOTRON, 8.10e9, 8.10e9),
        (NEMOTRON_MOE, 31.6e9, 3.6e9),
        (JAMBA, 51.6e9, 12.1e9),
        (QWEN, 79.7e9, 3.9e9),
    ],
)
def test_parameters_equal_the_published_totals(config: dict[str, Any], total: float, active: float) -> None:
    """Active parameters include the embedding; published counts of some families leave it out."""
    model = read(config)
    assert model.parameters == pytest.approx(total, rel=2e-3)
    assert model.active_parameters == pytest.approx(active, rel=1.5e-2)


def test_patterns_of_layers() -> None:
    assert [kind.mixer for kind in read(GEMMA).layer_kinds[:7]] == ["window"] * 5 + ["attention", "window"]
    assert [kind.mixer for kind in read(GPT_OSS).layer_kinds[:3]] == ["window", "attention", "window"]
    assert [kind.mixer for kind in read(QWEN).layer_kinds[:4]] == ["linear"] * 3 + ["attention"]
    assert read(JAMBA).layer_kinds[4] == BlockKind("attention", "dense")
    assert read(JAMBA).layer_kinds[5] == BlockKind("mamba", "moe")
    assert read(NEMOTRON).layer_kinds[:2] == (BlockKind("mamba2", "none"), BlockKind("none", "dense"))
    assert read(NEMOTRON_MOE).moe_layers == 23


@pytest.mark.parametrize("listed", [["sliding_attention"], "full_attention", [[1], {}, "a", None]])
def test_unknown_layer_types_are_an_error(listed: object) -> None:
    layers = len(listed) if isinstance(listed, list) and len(listed) > 1 else GEMMA["num_hidden_layers"]
    with pytest.raises(ConfigError, match="layer_types"):
        read(GEMMA | {"layer_types": listed, "num_hidden_layers": layers})
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        read(NEMOTRON | {"hybrid_override_pattern": "MX"})


def test_a_hybrid_model_is_planned_and_not_trained() -> None:
    config = parse_huggingface_config(NEMOTRON, "config.json")
    assert config.model_config is None
    assert any("cannot train" in note for note in config.notes)


def test_a_window_bounds_the_attended_tokens() -> None:
    for sequence, window in ((8, 3), (16, 16), (16, 0)):
        exact = sum(min(position, window or sequence) for position in range(sequence + 1)) / sequence
        assert attended_tokens(sequence, window) == pytest.approx(exact, abs=0.51)
    assert attended_tokens(1 << 17, 128) == pytest.approx(128, rel=0.01)


def test_attention_flops_of_windows_do_not_grow_with_the_sequence() -> None:
    model = read(GEMMA)
    window, full = BlockKind("window"), BlockKind("attention")
    assert model.mixer_flops(full, 1 << 16) == 2 * model.mixer_flops(full, 1 << 15)
    assert isclose(model.mixer_flops(window, 1 << 16), model.mixer_flops(window, 1 << 15), rel_tol=0.01)
    uniform = replace(model, layer_kinds=(), sliding_window=0)
    assert step_flops(model, job(model, 1 << 15)).model < 0.8 * step_flops(uniform, job(uniform, 1 << 15)).model


def test_a_uniform_pattern_equals_a_model_without_a_pattern() -> None:
    plain = Architecture("plain", 24, 2048, 16, 8, 128, 8192, 32000)
    listed = replace(plain, layer_kinds=(BlockKind(),) * 24)
    assert listed.parameters == plain.parameters
    layouts = (Layout(1, 1, 8, 1, 1, 1), Layout(2, 1, 2, 1, 2, 1))
    for layout in layouts:
        one, other = (estimate(job(model, layout=layout)) for model in (plain, listed))
        assert one.seconds == other.seconds
        assert one.peak_memory == other.peak_memory


@pytest.mark.parametrize("config", [GEMMA, NEMOTRON, NEMOTRON_MOE, JAMBA, QWEN, GPT_OSS])
@pytest.mark.parametrize("layout", [Layout(1, 1, 8, 1, 1, 1), Layout(2, 1, 2, 1, 2, 1), Layout(1, 1, 4, 2, 1, 1)])
def test_hybrid_models_are_estimated_on_every_axis(config: dict[str, Any], layout: Layout) -> None:
    predicted = estimate(job(read(config), layout=layout))
    assert 0 < predicted.mfu < 0.9
    assert predicted.peak_memory.activations > 0


def test_parameters_of_stages_add_up() -> None:
    model = read(NEMOTRON)
    whole = estimate(job(model, layout=Layout(1, 1, 1, 1, 1, 1), sharding="none")).peak_memory.parameters
    assert whole == pytest.approx(4 * model.parameters, rel=1e-6)


def test_time_of_scans_is_linear_in_the_sequence() -> None:
    model = replace(read(NEMOTRON), sliding_window=0)
    times = [
        kind_time(model, layer_shape(job(model, sequence)), BlockKind("mamba2", "none")) for sequence in (4096, 8192)
    ]
    assert times[1].attention == pytest.approx(2 * times[0].attention, rel=1e-6)
    attention = [kind_time(model, layer_shape(job(model, sequence)), BlockKind()) for sequence in (4096, 8192)]
    assert attention[1].attention == pytest.approx(4 * attention[0].attention, rel=1e-6)


def test_states_in_generation_are_constant_where_caches_grow() -> None:
    nemotron, gemma = read(NEMOTRON), read(GEMMA)
    states = 24 * (nemotron.state_space or StateSpace(1, 1)).cache_elements
    attention_layers = sum(kind.has_attention for kind in nemotron.layer_kinds)
    assert nemotron.cache_elements(1000) - attention_layers * 2 * 8 * 128 * 1000 == states
    full = 4 * 2 * 256 * 4096
    assert gemma.cache_elements(4096) == full + 22 * 2 * 256 * 512
    assert LinearAttention(16, 32, 128, 128).cache_elements == 32 * 128 * 128 + 8192 * 3
