"""Low-rank adaptation of one process: targets, the frozen base, and the numbers of peft."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.config import LoraConfig, ModelConfig, load_config
from meshwright.base.models.registry import FAMILIES, lora_spec, stored_parameters
from meshwright.core.models.init import build_model
from meshwright.core.weights.adapters import PEFT_FACTORS, peft_names
from meshwright.errors import ConfigError

MODEL = ModelConfig(vocab=40, width=32, layers=2, heads=4, kv_heads=2, ffn=56)


def targets(model, *patterns):
    spec = lora_spec(model, LoraConfig(rank=2, targets=patterns))
    return [p.name.removesuffix(".lora_a") for p in spec.parameters if p.name.endswith(".lora_a")]


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_with_factors_is_that_of_the_module(family):
    experts = ["--model.experts=4"] if family in ("mixtral", "deepseek_v2") else []
    config = load_config(overrides=[f"--model.family={family}", "--lora.rank=2", "--model.kv_heads=4", *experts])
    spec, model = lora_spec(config.model, config.lora), build_model(config.model, 0, lora=config.lora)
    named = dict(model.named_parameters())
    assert list(named) == [parameter.name for parameter in spec.parameters]
    assert {name: tuple(p.shape) for name, p in named.items()} == {p.name: p.shape for p in spec.parameters}
    assert {name for name, p in named.items() if p.requires_grad} == {n for n in named if ".lora_" in n}
    assert sum(name.endswith("lora_a") for name in named) >= 2 * config.model.layers


def test_first_step_begins_at_the_base_model():
    base, adapted = (build_model(MODEL, 3, torch.float64, lora=LoraConfig(rank=rank)) for rank in (0, 4))
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(base(tokens, tokens)[0], adapted(tokens, tokens)[0])


def test_targets_are_patterns_or_names_of_hugging_face():
    blocks = [f"decoder.blocks.{layer}" for layer in range(2)]
    assert targets(MODEL, "*.attention.q", "*.1.ffn.*") == [
        f"{blocks[0]}.attention.q",
        f"{blocks[1]}.attention.q",
        *(f"{blocks[1]}.ffn.{name}" for name in ("gate", "up", "down")),
    ]
    assert targets(MODEL, "o_proj", "down_proj") == targets(MODEL, "*.attention.out", "*.ffn.down")
    with pytest.raises(ConfigError, match="matches no projection"):
        targets(MODEL, "*.attention.query")
    experts = ModelConfig(vocab=40, width=32, layers=2, ffn=56, experts=4, experts_shared=1)
    for pattern in ("*.ffn.*", "*.ffn.bank", "*.router"):
        with pytest.raises(ConfigError, match="experts and routers stay frozen"):
            targets(experts, pattern)
    assert len(targets(experts, "*.ffn.shared.*")) == 6


@pytest.fixture
def float64_throughout(monkeypatch):
    """Makes transformers compute rotary tables, norms and the loss in float64, where it asks for float32."""
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def test_loss_and_gradients_are_those_of_peft(float64_throughout):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = LoraConfig(rank=3, alpha=7.0, targets=("*.attention.*", "down_proj"))
    ours = build_model(MODEL, 0, torch.float64, lora=lora)
    config = transformers.LlamaConfig(
        vocab_size=MODEL.vocab,
        hidden_size=MODEL.width,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.kv_heads,
        intermediate_size=MODEL.ffn,
        rms_norm_eps=MODEL.norm_eps,
        rope_theta=MODEL.rope_theta,
    )
    base = transformers.LlamaForCausalLM(config).double()
    base.load_state_dict({p.stored: ours.get_parameter(p.name) for p in stored_parameters(MODEL)}, strict=True)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, target_modules=modules)).double()
    names = peft_names(MODEL, lora)
    factors = {name.replace(".weight", ".default.weight"): ours.get_parameter(own) for name, own in names.items()}
    with torch.no_grad():
        for name, own in factors.items():
            theirs.get_parameter(name).copy_(own.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name))))
    tokens = torch.randint(MODEL.vocab, (3, 17), generator=torch.Generator().manual_seed(1))
    total, count = ours(tokens[:, :-1], tokens[:, 1:])
    loss = theirs(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(total / count, loss, rtol=1e-12, atol=0)
    (total / count).backward()
    loss.backward()
    assert len(factors) == 2 * 5 * len(PEFT_FACTORS)
    for name, own in factors.items():
        torch.testing.assert_close(own.grad, theirs.get_parameter(name).grad, rtol=1e-9, atol=1e-14, msg=name)
    assert all(p.grad is None for name, p in ours.named_parameters() if ".lora_" not in name)
