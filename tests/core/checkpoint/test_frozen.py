"""What a checkpoint of low-rank adaptation contains."""

from __future__ import annotations

import torch

from meshwright.base.models.registry import run_spec
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.frozen import separate_frozen
from meshwright.core.models.init import build_on_meta, set_trainable
from meshwright.core.parallel.world import World
from tests.kit.small_run import small_config


def test_factors_of_a_frozen_group_are_saved():
    frozen = '--optimizer.groups=[{pattern = "*.lora_a", frozen = true}]'
    config = small_config("--lora.rank=2", frozen, ranks=1)
    spec = run_spec(config)
    model = set_trainable(build_on_meta(config.model, torch.float32, config.lora), spec).to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    saved, base = separate_frozen(parameters, config, Layout(), World())
    factors = {name for name in parameters if name.endswith(("lora_a", "lora_b"))}
    assert saved.keys() == factors
    assert {name for name in factors if not parameters[name].requires_grad}
    assert base["weights"] == "the initialization of seed 0"
