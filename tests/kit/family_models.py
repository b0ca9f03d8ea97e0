"""Small models of every family, and the models of transformers with the same weights."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from meshwright.base.config import ModelConfig
from meshwright.base.config.model import OptionTable
from meshwright.base.models.registry import stored_parameters, write_huggingface_config
from meshwright.core.models.init import build_model


def small(family: str, options: dict | None = None, **sizes) -> ModelConfig:
    sizes = {"vocab": 97, "width": 24, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 40} | sizes
    return ModelConfig(family=family, options=OptionTable(options or {}), **sizes)


LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_factor": 4.0,
    "rope_low_frequency_factor": 1.0,
    "rope_high_frequency_factor": 4.0,
    "rope_original_context": 40,
}
YARN = {
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_beta_fast": 8.0,
    "rope_original_context": 64,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 0.5,
}
GROUPS = {"groups": 3, "groups_active": 2, "routed_scale": 2.5, "dense_layers": 2, "dense_ffn": 30}
MLA = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
EXPERTS = {"kv_heads": 4, "experts": 6, "experts_active": 2, "experts_shared": 2, "ffn": 16}
GEMMA2 = {"head_size": 8, "query_scale": 5.0, "attention_softcap": 2.0, "logit_softcap": 3.0, "window": 4}
MODELS = {
    "llama": small("llama", norm_eps=1e-3),
    "llama, linear": small("llama", {"rope_scaling": "linear", "rope_factor": 3.0}, tie=True),
    "llama, llama3": small("llama", LLAMA3, width=64, rope_theta=500.0),
    "gemma2": small("gemma2", GEMMA2, tie=True, norm_eps=1e-6),
    "qwen2": small("qwen2", rope_theta=100.0),
    "qwen3": small("qwen3", {"head_size": 10}, tie=True),
    "mistral": small("mistral", {"head_size": 10, "window": 4}),
    "mistral, no window": small("mistral"),
    "mixtral": small("mixtral", {"head_size": 10, "window": 5}, experts=4, experts_active=2),
    "mixtral, one expert": small("mixtral", experts=4, experts_active=1),
    "gpt2": small("gpt2", {"positions": 12}, kv_heads=4, tie=True),
    "deepseek_v2": small("deepseek_v2", MLA, **EXPERTS, norm_eps=1e-3),
    "deepseek_v2, compressed queries, yarn": small(
        "deepseek_v2", MLA | YARN | {"q_lora_rank": 14}, **EXPERTS, rope_theta=30.0
    ),
    "deepseek_v2, groups": small("deepseek_v2", MLA | GROUPS, **EXPERTS, tie=True),
    "gpt2, untied": small("gpt2", {"positions": 11}, kv_heads=4, norm_eps=1e-3),
}
"""The frequencies of `llama, llama3` are low, in between, and high."""


def stored_tensors(config: ModelConfig, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by parameter as the tensors of a folder. Parameters that share a tensor are in the order of its rows."""
    parts, transposed = {}, set()
    for stored in stored_parameters(config):
        value = values[stored.name]
        parts.setdefault(stored.stored, []).append(value if stored.expert is None else value[stored.expert])
        if stored.transposed:
            transposed.add(stored.stored)
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    return {name: (tensor.T if name in transposed else tensor).contiguous() for name, tensor in tensors.items()}


def load_same_weights(model: torch.nn.Module, config: ModelConfig, folder):
    """The model of transformers with the weights of `model`."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(stored_tensors(config, weights), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(write_huggingface_config(config)))
    dtype = next(model.parameters()).dtype
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager)
    if config.family == "gemma2":  # transformers has it in float32
        theirs.model.embed_tokens.embed_scale = torch.tensor(config.width**0.5, dtype=dtype)
    return theirs


def same_model(config: ModelConfig, dtype: torch.dtype, folder):
    """(our model, transformers' model) with equal random weights."""
    ours = build_model(config, 0, dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return ours, load_same_weights(ours, config, folder)
