"""GPT-2 as Hugging Face folders store it: transposed matrices, with queries, keys and values in one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat
from meshwright.base.models.config_fields import ConfigFields, Heads, Layers, Tokens, Vocabulary, Width
from meshwright.base.models.gpt2.spec import GPT2Options
from meshwright.base.models.huggingface import StoredParameter

NORMS = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
LINEARS = {"attention.out": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
INERT = frozenset(
    {
        *DROPOUTS,  # models train without dropout
        *("n_ctx", "output_past"),  # of early versions of transformers
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    }
)
"""Keys of the family that do not change what the weights compute."""


def read_config(fields: ConfigFields) -> dict[str, Any]:
    width, heads = fields.number(Width, "n_embd", "hidden_size"), fields.number(Heads, "n_head", "num_attention_heads")
    fields.require("activation_function", "gelu_new", "gelu_new")
    fields.require("scale_attn_weights", True, True)
    fields.require("scale_attn_by_inverse_layer_idx", False, False)
    fields.require("add_cross_attention", False, False)
    fields.read.update(INERT | {"reorder_and_upcast_attn"})  # scores have the same value in whatever order
    return {
        "vocab": fields.number(Vocabulary, "vocab_size"),
        "width": width,
        "layers": fields.number(Layers, "n_layer", "num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads,
        "ffn": fields.number(Width, "n_inner", default=4 * width),
        "norm_eps": float(fields.get(PositiveFloat, 1e-5, "layer_norm_epsilon")),
        "tie": fields.flag("tie_word_embeddings", True),
        "options": {"positions": fields.number(Tokens, "n_positions", "max_position_embeddings", default=1024)},
    }


def write_config(config: ModelConfig, options: GPT2Options) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "n_positions": options.positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tie,
        **dict.fromkeys(DROPOUTS, 0.0),
    }


def stored_parameters(config: ModelConfig, _options: GPT2Options) -> Iterator[StoredParameter]:
    yield StoredParameter("decoder.embedding.weight", "transformer.wte.weight")
    yield StoredParameter("decoder.position.weight", "transformer.wpe.weight")
    for layer in range(config.layers):
        ours, theirs = f"decoder.blocks.{layer}", f"transformer.h.{layer}"
        for module, stored in NORMS.items():
            for kind in ("weight", "bias"):
                yield StoredParameter(f"{ours}.{module}.{kind}", f"{theirs}.{stored}.{kind}")
        for index, name in enumerate(("q", "k", "v")):
            rows, module, fused = (index * config.width, (index + 1) * config.width), f"attention.{name}", "attn.c_attn"
            yield StoredParameter(f"{ours}.{module}.weight", f"{theirs}.{fused}.weight", transposed=True, rows=rows)
            yield StoredParameter(f"{ours}.{module}.bias", f"{theirs}.{fused}.bias", rows=rows)
        for module, stored in LINEARS.items():
            yield StoredParameter(f"{ours}.{module}.weight", f"{theirs}.{stored}.weight", transposed=True)
            yield StoredParameter(f"{ours}.{module}.bias", f"{theirs}.{stored}.bias")
    for kind in ("weight", "bias"):
        yield StoredParameter(f"decoder.norm.{kind}", f"transformer.ln_f.{kind}")
    if not config.tie:
        yield StoredParameter("head.weight", "lm_head.weight")
