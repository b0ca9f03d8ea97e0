"""The Gemma 2 family equals transformers' Gemma2ForCausalLM, in its loss and in every gradient."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from meshwright.config import IGNORE_INDEX, ModelConfig, load_config
from meshwright.config.model import OptionTable
from meshwright.errors import ConfigError
from meshwright.models.gemma2.model import SoftCappedAttention
from meshwright.models.init import build_model
from meshwright.models.registry import model_spec

OPTIONS = {"head_size": 8, "query_scale": 5.0, "attention_softcap": 2.0, "logit_softcap": 3.0, "window": 4}
CONFIG = ModelConfig(
    family="gemma2",
    vocab=97,
    width=24,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn=40,
    tie=True,
    norm_eps=1e-6,
    options=OptionTable(OPTIONS),
)
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def transformers_name(name: str) -> str:
    if name == "decoder.embedding.weight":
        return "model.embed_tokens.weight"
    if name == "decoder.norm.weight":
        return "model.norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"model.layers.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def transformers_model() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=CONFIG.vocab,
        hidden_size=CONFIG.width,
        num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads,
        num_key_value_heads=CONFIG.kv_heads,
        intermediate_size=CONFIG.ffn,
        head_dim=8,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        sliding_window=4,
        rms_norm_eps=CONFIG.norm_eps,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config).double()
    model.model.embed_tokens.embed_scale = torch.tensor(CONFIG.width**0.5, dtype=torch.float64)
    return model


@pytest.fixture
def float64_throughout(monkeypatch):
    """Lifts the casts to float32 of transformers' norms, softmax and rotary tables."""
    softmax = torch.nn.functional.softmax
    frequencies = 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)

    def tables(_self, _x, position_ids):
        angles = position_ids[..., None] * frequencies.repeat(2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    monkeypatch.setattr("transformers.models.gemma2.modeling_gemma2.Gemma2RotaryEmbedding.forward", tables)


@pytest.mark.usefixtures("float64_throughout")
def test_loss_and_gradients_are_those_of_transformers():
    ours, theirs = build_model(CONFIG, 0, torch.float64), transformers_model()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            theirs.get_parameter(transformers_name(name)).copy_(parameter.normal_(std=0.5))
    tokens = torch.randint(CONFIG.vocab, (2, 11))
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([10]), IGNORE_INDEX)
    total, count = ours(tokens, labels)
    total.backward()
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    expected.backward()
    assert count == 20
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
    for name, parameter in ours.named_parameters():
        gradient = theirs.get_parameter(transformers_name(name)).grad
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_attention_does_not_cross_documents_nor_its_window():
    q, k, v = (torch.randn(1, heads, 9, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1]])
    out = SoftCappedAttention(0.3, 2.0, 3)(q, k, v, documents)
    (seen,) = torch.autograd.grad(out[0, :, 5].sum(), v, retain_graph=True)
    assert seen.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [3, 4, 5]
    (seen,) = torch.autograd.grad(out[0, :, 7].sum(), v)
    assert seen.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [6, 7]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.experts=4"], "model.experts = 4, and the family gemma2 has no experts"),
        (["--model.options.windows=4"], "unknown key model.options.windows = 4; did you mean model.options.window?"),
        (["--model.options.window=0"], "model.options.window = 0 is out of range; expected"),
        (["--model.options.window=wide"], 'model.options.window = "wide" has the wrong type; expected an integer'),
        (["--model.options.head_size=7"], "model.options.head_size = 7 is odd; expected an even number"),
        (["--model.family=gemma"], "model.family = gemma is unknown; expected one of llama, gemma2"),
        (["--model.family=llama", "--model.options.window=4"], "unknown key model.options.window = 4; expected"),
    ],
)
def test_wrong_options_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        model_spec(load_config(overrides=["--model.family=gemma2", *overrides]).model)
    assert message in str(error.value)
