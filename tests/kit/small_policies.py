"""Small policies for the tests of generators."""

from __future__ import annotations

import torch

from meshwright.base.config import ModelConfig
from meshwright.base.models.registry import model_spec
from meshwright.core.models.init import build_model
from meshwright.rl.generator.policy_model import FamilyPolicy

PROMPT = [5, 1, 7, 3]
LLAMA = ModelConfig(family="llama", vocab=97, width=24, layers=3, heads=4, kv_heads=2, ffn=40)


def random_module(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """Weights that are larger than initial ones, so that probabilities differ."""
    module = build_model(config, 0, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return module


def family_policy(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32, seed: int = 0) -> FamilyPolicy:
    return FamilyPolicy(random_module(config, dtype, seed), model_spec(config))
