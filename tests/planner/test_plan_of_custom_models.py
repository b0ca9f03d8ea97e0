"""`meshwright.plan` of a user's model: the ranking, its explanation, and the layouts that can serve the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import meshwright
from meshwright.errors import ConfigError
from meshwright.planner.display.plan_text import show_plan
from meshwright.planner.search.plan_result import plan_json, plan_toml
from tests.kit.predicted_models import MODELS, build_llama, config_for, summed_loss


def build_on_meta() -> nn.Module:
    with torch.device("meta"):
        return build_llama()


@pytest.fixture(scope="module")
def llama_plan():
    return meshwright.plan(config_for(), "h100:8", model=build_on_meta, loss=summed_loss, source=MODELS["Llama"].source)


def test_plan_ranks_and_explains_a_model_on_the_meta_device(llama_plan, capsys):
    assert llama_plan.workload.model.parameters == sum(p.numel() for p in build_on_meta().parameters())
    assert len(llama_plan.search.ranked) > 2
    explanation = llama_plan.explanation
    parts = (explanation.problem, explanation.mechanism, explanation.communication, explanation.tradeoff)
    assert all(parts)
    assert explanation.measurement
    record = json.loads(json.dumps(plan_json(llama_plan, 3)))
    assert record["model"]["name"] == "LlamaForCausalLM"
    assert "layout" in plan_toml(llama_plan)
    show_plan(llama_plan, 3, None)
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_plan_searches_only_axes_that_serve_the_model():
    source = MODELS["CNN"].source
    result = meshwright.plan(config_for(), "h100:8", model=MODELS["CNN"].build, loss=summed_loss, source=source)
    layouts = [plan.job.layout for plan in result.search.ranked]
    assert all(layout.tensor == layout.context == layout.expert == 1 for layout in layouts)
    with pytest.raises(ConfigError, match=r"layout\.tensor = 2 cannot serve ConvNet"):
        meshwright.plan(
            config_for(),
            "h100:8",
            model=MODELS["CNN"].build,
            loss=summed_loss,
            source=source,
            overrides=["layout.tensor=2"],
        )


def test_plan_needs_a_config_or_a_model():
    with pytest.raises(ConfigError, match="neither a config nor a model"):
        meshwright.plan()


def test_plan_of_a_preset_does_not_import_torch():
    code = "import sys, meshwright; meshwright.plan('gpt2-124m', 'a100-80:8'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
