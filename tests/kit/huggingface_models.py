"""Small configs of transformers, one for each family."""

from __future__ import annotations

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CONFIGS = {
    "llama": SIZES,
    "gemma2": SIZES | {"head_dim": 8},
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 6},
    "mistral": SIZES | {"head_dim": 6, "sliding_window": 5},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": SIZES
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    | {"first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 8},
    "gpt2": {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 20},
}
"""model_type -> the sizes of a small config of transformers"""
