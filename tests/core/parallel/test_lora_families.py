"""Low-rank factors of every family: on layouts with every axis, their gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.models.registry import FAMILIES
from meshwright.testing import run_ranks
from tests.core.parallel.test_lora_gradients import SMALL, gradients
from tests.kit.small_run import load_cpu_config

MODELS = {
    "gemma2": ["--model.options.head_size=6"],
    "gpt2": ["--model.kv_heads=4", "--model.options.positions=16"],
    "mixtral": ["--model.experts=4"],
    "deepseek_v2": ["--model.kv_heads=4", "--model.experts=4", "--model.experts_shared=1"],
}
"""Settings of the families that need some."""
TARGETS = {"gpt2": "*.attention.*,*.ffn.*", "deepseek_v2": "*.attention.*,*.ffn.shared.*"}
LAYOUTS = {
    "ZeRO-2 x tensor": ["--layout.replicate=2", "--layout.tensor=2", "--layout.shard=gradients"],
    "pipeline x tensor": ["--layout.pipeline=2", "--layout.tensor=2"],
    "context x ZeRO-3": ["--layout.context=2", "--layout.replicate=2", "--layout.shard=parameters"],
}


def family_config(family, layout):
    targets = TARGETS.get(family, "*.attention.*")
    options = [f"--model.family={family}", f"--lora.targets={targets}", "--context.method=all-to-all"]
    return load_cpu_config(overrides=[*SMALL, *MODELS.get(family, []), *options, *layout])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_factors_are_those_of_one_process(family):
    [[expected]] = run_ranks(gradients, 1, [family_config(family, [])])
    by_rank = run_ranks(gradients, 4, [family_config(family, layout) for layout in LAYOUTS.values()])
    for index, layout in enumerate(LAYOUTS):
        found = {name: gradient for rank in by_rank for name, gradient in rank[index].items()}
        assert found.keys() == expected.keys(), layout
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=f"{layout}: {name}")
