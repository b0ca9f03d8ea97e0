"""Presets: settings of known models, and of two models that train on a laptop."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"vocab": 128256, "kv_heads": 8, "rope_theta": 500_000.0}
_LARGE_RUN: dict[str, Any] = {
    "steps": 10_000,
    "optimizer": {"lr": 3e-4},
    "schedule": {"warmup": 500},
    "precision": {"compute": "bf16"},
    "checkpoint": {"seconds": 300.0},
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "steps": 1000,
        "model": {"width": 256, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 704},
        "data": {"sequence": 256},
        "batch": {"global": 32},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup": 50},
    },
    # GPT-2 sizes on this decoder: SwiGLU with 8/3 of the width has as many parameters as the 4x MLP of GPT-2.
    "gpt2-124m": _LARGE_RUN
    | {
        "model": {"vocab": 50304, "width": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 2048, "tie": True},
        "data": {"sequence": 1024},
        "batch": {"global": 480},
        "optimizer": {"lr": 6e-4},
    },
    "llama-1b": _LARGE_RUN
    | {
        "model": _LLAMA3 | {"width": 2048, "layers": 16, "heads": 32, "ffn": 8192, "tie": True},
        "data": {"sequence": 4096},
        "batch": {"global": 512},
    },
    "llama-8b": _LARGE_RUN
    | {
        "model": _LLAMA3 | {"width": 4096, "layers": 32, "heads": 32, "ffn": 14336},
        "data": {"sequence": 8192},
        "batch": {"global": 512},
    },
    "llama-70b": _LARGE_RUN
    | {
        "model": _LLAMA3 | {"width": 8192, "layers": 80, "heads": 64, "ffn": 28672},
        "data": {"sequence": 8192},
        "batch": {"global": 1024},
        "optimizer": {"lr": 1.5e-4},
    },
    "llama-405b": _LARGE_RUN
    | {
        "model": _LLAMA3 | {"width": 16384, "layers": 126, "heads": 128, "ffn": 53248},
        "data": {"sequence": 8192},
        "batch": {"global": 2048},
        "optimizer": {"lr": 8e-5},
    },
    "mixtral-8x7b": _LARGE_RUN
    | {
        "model": {
            "vocab": 32000,
            "width": 4096,
            "layers": 32,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14336,
            "rope_theta": 1_000_000.0,
            "experts": 8,
            "experts_active": 2,
        },
        "data": {"sequence": 4096},
        "batch": {"global": 1024},
    },
    # Every layer has experts here; the first layer of the original has a dense feed-forward of width 10944 instead.
    "deepseek-moe-16b": _LARGE_RUN
    | {
        "model": {
            "vocab": 102400,
            "width": 2048,
            "layers": 28,
            "heads": 16,
            "kv_heads": 16,
            "ffn": 1408,
            "norm_eps": 1e-6,
            "experts": 64,
            "experts_active": 6,
            "experts_shared": 2,
        },
        "data": {"sequence": 4096},
        "batch": {"global": 4608},
        "optimizer": {"lr": 4.2e-4},
    },
}
