"""Tensor-parallel plans of transformers: every gradient equals that of one process, and impossible plans are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from benchmarks.transformers_plans import build, compare, families, full, loss_and_gradients, relative_errors
from meshwright import ParallelSpec, train
from meshwright.base.config import config_from_dict
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.tensor_parallel import apply_tensor_parallel, reduce_partial_gradients, require_tp_plan
from meshwright.core.parallel.tensor_plans.local_styles import Colwise, PartialGradients
from meshwright.errors import ConfigError
from meshwright.testing import World, run_ranks

transformers.logging.set_verbosity_error()

FAMILIES = {
    "llama": "grouped-query attention",
    "qwen3": "a norm of each head, whose gradient is a partial sum",
    "gemma2": "a scaled and tied embedding with a padding token",
    "apertus": "a learned activation function, which the shipped plan does not name",
    "phi3": "fused matrices, gathered and split",
    "deepseek_v3": "multi-head latent attention",
    "mixtral": "routed experts, which stay replicated",
    "gpt_neox": "biases, fused heads",
    "gpt2": "a plan of our own, with transposed and fused matrices",
    "bert": "a plan of our own",
    "vit": "a plan of our own, on images",
}


def build_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config).double().eval()


def images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def gradients_of_all_families(_world: World) -> dict[str, dict[str, float]]:
    """Family -> parameter -> largest error relative to the gradient of one process."""
    errors = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for family in FAMILIES:
        model = build_vit() if family == "vit" else build(family)
        batch = images() if family == "vit" else None
        _, expected = loss_and_gradients(copy.deepcopy(model), 2, batch)
        apply_tensor_parallel(model, infer_parallel_spec(model), mesh)
        loss_and_gradients(model, 2, batch)
        reduce_partial_gradients(model.parameters(), mesh)
        found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        errors[family] = relative_errors(found, expected)
    return errors


@pytest.fixture(scope="module")
def errors() -> list[dict[str, dict[str, float]]]:
    return run_ranks(gradients_of_all_families, 2, timeout=240)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_all_parameters_equal_one_process(family, errors):
    for rank in errors:
        worst = max(rank[family], key=lambda name: rank[family][name])
        assert rank[family][worst] < 1e-10, worst


class Tokens:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(96, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train_qwen3(folder, layout: dict[str, Any], **overrides: Any) -> dict[str, torch.Tensor]:
    model = build("qwen3").train()
    settings: dict[str, Any] = {
        "steps": 2,
        "batch": {"global": 4, "micro": 1},
        "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.01},
        "launch": {"device": "cpu", "collective_timeout": 60.0},
        "layout": layout,
    }
    train(config_from_dict(settings | overrides), model=model, source=Tokens(), run=folder, quiet=True)
    return model.state_dict()


def test_qwen3_on_fsdp_and_tensor_parallel_ranks_gives_the_weights_of_one_process(tmp_path):
    """The model casts to float32 inside, so that sums in another order may differ by more than 1e-10."""
    expected = train_qwen3(tmp_path / "single_process", {"replicate": 1})
    layouts = {
        "tensor": ({"replicate": 1, "tensor": 2}, {}),
        "fsdp": ({"replicate": 2, "shard": "parameters", "tensor": 2}, {"activation_checkpoint": {"mode": "full"}}),
    }
    for name, (layout, overrides) in layouts.items():
        state = train_qwen3(tmp_path / name, layout, **overrides)
        for parameter, value in expected.items():
            assert torch.allclose(state[parameter], value, rtol=1e-7, atol=1e-9), (name, parameter)


def test_shipped_plan_is_translated_on_the_meta_device():
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_hidden_layers=2))
    plan = infer_parallel_spec(model).tp_plan()
    assert isinstance(plan["model.layers.*.self_attn.k_proj"], Colwise)
    assert isinstance(plan["model.layers.*.self_attn.q_norm"], PartialGradients)


def test_models_without_a_shipped_plan_have_no_plan():
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2))
    assert infer_parallel_spec(model).tp_plan() == {}


@pytest.mark.long
def test_translations_of_all_shipped_plans_give_the_gradients_of_one_process():
    known = {"doge", "inkling_text"}  # refused in one line: the first mixes all heads, the second shards 3-d weights
    rows = [compare(family, "meshwright", "tensor") for family in families("tensor") if family not in known]
    assert not [row for row in rows if row.verdict != "right"]


def test_a_shipped_plan_that_cannot_run_is_refused():
    model = build("doge")
    with pytest.raises(ConfigError, match="plan that transformers ships for doge cannot run"):
        infer_parallel_spec(model).tp_plan()


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": ColwiseParallel()}, "names blocks.\\*.up, and the model has no such module"),
        ({"up": ColwiseParallel()}, "layout.tensor = 4 does not divide dimension 0 of up.weight, which is 6"),
        ({"down": RowwiseParallel()}, "layout.tensor = 4 does not divide dimension 1 of down.weight, which is 6"),
    ],
)
def test_impossible_rows_of_a_plan_are_named_before_ranks_start(plan, message):
    with pytest.raises(ConfigError, match=message):
        require_tp_plan(TwoLayers(), ParallelSpec(tp_plan=lambda: plan), 4)


def test_fewer_key_value_heads_than_tensor_parallel_ranks_are_named():
    model = build("llama")
    with pytest.raises(ConfigError, match=r"does not divide the 2 attention heads of model.layers.0.self_attn.k_proj"):
        require_tp_plan(model, infer_parallel_spec(model), 4)


def test_a_tied_weight_that_is_sharded_once_is_named():
    model = build("gemma2")
    spec = infer_parallel_spec(model, ParallelSpec(tp_plan=lambda: {"lm_head": ColwiseParallel()}))
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight is tied to another parameter"):
        require_tp_plan(model, spec, 2)
