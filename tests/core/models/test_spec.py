"""The spec of every family equals the module that the family builds: parameters, buffers, tied weights and costs."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import meshwright
from meshwright.base.config import ModelConfig
from meshwright.base.config.model import OptionTable
from meshwright.base.models.registry import FAMILIES, model_spec
from meshwright.base.models.spec import AFTER, BEFORE, ROOT, Cost, ModelSpec, ParameterSpec
from meshwright.core.models.init import build_model, build_on_meta

SMALL = ModelConfig(vocab=37, width=24, layers=3, heads=4, kv_heads=2, ffn=40)
MODELS = {
    "llama": SMALL,
    "llama tied": replace(SMALL, tie=True),
    "llama experts": replace(SMALL, experts=4, experts_active=2, experts_shared=1),
    "llama experts tied": replace(SMALL, experts=4, experts_active=1, tie=True),
    "deepseek_v2": replace(SMALL, family="deepseek_v2", kv_heads=4, experts=4, experts_shared=1),
    "deepseek_v2 tied": replace(
        SMALL,
        family="deepseek_v2",
        kv_heads=4,
        experts=4,
        tie=True,
        options=OptionTable({"q_lora_rank": 20, "dense_layers": 2, "groups": 2}),
    ),
    "gpt2": replace(SMALL, family="gpt2", kv_heads=4),
    "gpt2 tied": replace(SMALL, family="gpt2", kv_heads=4, tie=True),
    "gemma2": replace(SMALL, family="gemma2"),
    "gemma2 tied": replace(SMALL, family="gemma2", tie=True),
    "qwen2": replace(SMALL, family="qwen2"),
    "qwen3": replace(SMALL, family="qwen3", tie=True, options=OptionTable({"head_size": 10})),
    "mistral": replace(SMALL, family="mistral", options=OptionTable({"head_size": 10, "window": 7})),
    "mixtral": replace(SMALL, family="mixtral", experts=4, experts_active=2),
}
BATCH, SEQUENCE = 2, 48


def total_of(name: str, spec: ModelSpec, batch: int) -> float:
    """One of the costs of the full model."""
    costs = [spec.before_cost, *(block.cost for block in spec.blocks), spec.after_cost]
    return sum(getattr(cost, name).of(batch, SEQUENCE) for cost in costs)


def test_a_family_is_one_folder_and_one_line_of_the_registry():
    """Nothing else in the package imports a family's modules: its declaration in base, and its module in core."""
    package = Path(meshwright.__file__).parent
    models = package / "base" / "models"
    for family in FAMILIES:
        for path in package.rglob("*.py"):
            own = models / family in path.parents or path == package / "core" / "models" / f"{family}.py"
            if own or path == models / "registry.py":
                continue
            assert f"models.{family}" not in path.read_text(), path
    assert {path.name for path in models.iterdir() if (path / "spec.py").exists()} == set(FAMILIES)


def test_every_family_is_compared():
    assert {config.family for config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_spec_names_the_parameters_of_the_module_in_its_order(config):
    spec, module = model_spec(config), build_on_meta(config, torch.float32)
    assert [(p.name, p.shape) for p in spec.parameters] == [(n, tuple(p.shape)) for n, p in module.named_parameters()]
    assert [(b.name, b.shape) for b in spec.buffers] == [(n, tuple(b.shape)) for n, b in module.named_buffers()]
    every_name = dict(module.named_parameters(remove_duplicate=False))
    assert set(every_name) == set(spec.by_name)
    assert all(every_name[copy] is every_name[owner] for copy, owner in spec.tied.items())
    assert spec.parameter_count == sum(p.numel() for p in module.parameters())
    assert [name for name in spec.block_names if module.get_submodule(name)] == list(spec.block_names)
    assert all(p.decay == (len(p.shape) > 1) for p in spec.parameters)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_parameter_belongs_to_a_unit(config):
    spec = model_spec(config)
    for parameter in spec.parameters:
        if parameter.unit in spec.block_names:
            assert parameter.name.startswith(f"{parameter.unit}.")
        else:
            assert parameter.unit == ROOT if config.tie else parameter.unit in (BEFORE, AFTER)
    untied = {p.name: p.unit for p in spec.untied_parameters}
    assert untied["decoder.embedding.weight"] == BEFORE
    assert untied["head.weight"] == untied["decoder.norm.weight"] == AFTER


def test_parameter_of_a_loss_belongs_to_the_last_stage():
    spec = ModelSpec("custom", (ParameterSpec("loss.scale", (1,), ROOT), ParameterSpec("gain", (1,), ROOT)), ())
    assert [p.unit for p in spec.untied_parameters] == [AFTER, ROOT]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_tensor_parallel_plan_shards_the_dimension_that_the_spec_names(config):
    spec = model_spec(config)
    rows = dict.fromkeys(("colwise", "colwise_local", "vocab_embedding", "vocab_head"), 0)
    columns = dict.fromkeys(("rowwise_sequence", "rowwise_sequence_bias"), 1)
    dims = {"weight": rows | columns, "bias": rows}
    pattern = spec.block_pattern.removesuffix("*")
    for parameter in spec.parameters:
        module, _, kind = parameter.name.rpartition(".")
        name = f"{pattern}*.{module.removeprefix(pattern).partition('.')[2]}" if module.startswith(pattern) else module
        assert parameter.tp_dim == dims.get(kind, {}).get(spec.tp_plan.get(name, ""))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_forward_flops_are_those_of_the_flop_counter(config):
    """The counter knows neither the attention kernel of CPUs nor grouped products, which float64 does not use."""
    module = build_model(config, 0, torch.float64)
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(tokens, tokens)
    assert total_of("flops", model_spec(config), BATCH) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_saved_activations_are_those_that_autograd_saves(config):
    module, saved = build_model(config, 0), {}
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(config.vocab, (BATCH, SEQUENCE))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _ = module(tokens, tokens)
    assert total_of("activations", model_spec(config), BATCH) == pytest.approx(sum(saved.values()), rel=0.05)
    assert total > 0


def test_cost_is_a_polynomial_of_the_sequence():
    cost = Cost(1.0, 2.0, 3.0, 4.0)
    assert cost.of(5, 6) == 1 + 5 * (2 + 3 * 6 + 4 * 36)
    assert (cost + cost).of(1, 1) == 2 * cost.of(1, 1)
    assert Cost(per_sample=7.0).of(3) == 21


def test_costs_of_blocks_are_all_flops_with_half_of_the_pairs_of_causal_attention():
    spec = model_spec(SMALL)
    skipped = sum(block.cost.flops.per_pair for block in spec.blocks) * SEQUENCE**2 / 2
    lookup = 1.0  # the embedding has no FLOPs, and is not free
    assert sum(spec.block_costs(SEQUENCE)) == total_of("flops", spec, 1) - skipped + lookup
    assert prod(spec.parameters[0].shape) == SMALL.vocab * SMALL.width
