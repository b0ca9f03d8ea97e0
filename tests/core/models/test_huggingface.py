"""Every family reads and writes the config.json and the tensor names of its Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.base.config import ModelConfig
from meshwright.base.models.config_fields import ConfigFields
from meshwright.base.models.registry import (
    FAMILIES,
    model_spec,
    read_huggingface_model,
    stored_parameters,
    write_huggingface_config,
)
from meshwright.errors import ConfigError
from tests.kit.huggingface_models import CONFIGS


def read(tree: dict) -> ModelConfig:
    return read_huggingface_model(ConfigFields.of(tree, "config.json"))


def test_every_family_has_a_small_config():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_file_of_transformers_is_read_written_and_read_by_transformers(family):
    theirs = AutoConfig.for_model(family, **CONFIGS[family])
    ours = read(json.loads(theirs.to_json_string(use_diff=True)))
    assert ours.family == family
    written = write_huggingface_config(ours)
    again = AutoConfig.for_model(**json.loads(json.dumps(written)))
    assert read(json.loads(again.to_json_string(use_diff=False))) == ours
    assert read(written) == ours


@pytest.mark.parametrize("family", CONFIGS)
def test_stored_parameters_are_the_tensors_that_transformers_writes(family, tmp_path):
    theirs = AutoConfig.for_model(family, **CONFIGS[family])
    config = read(json.loads(theirs.to_json_string(use_diff=True)))
    AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    assert sorted({stored.stored for stored in stored_parameters(config)}) == names
    assert {stored.name for stored in stored_parameters(config)} == {p.name for p in model_spec(config).parameters}


PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""The config.json of published models, with their parameter counts."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_published_number_of_parameters(name):
    tree, options = PUBLISHED[name]["config"], PUBLISHED[name]["options"]
    config = read(tree)
    assert config.options == options
    assert read(write_huggingface_config(config)) == config
    assert model_spec(config).parameter_count == PUBLISHED[name]["parameters"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; expected "silu"'),
        ("llama", {"attention_bias": True}, "attention_bias = true is not supported; expected false"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling: rope_type = "dynamic" is not'),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 'rope_parameters: rope_type = "yarn"'),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta = 1 is unknown"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = true is not supported; expected false"),
        ("qwen2", {"head_dim": 16}, "head_dim = 16 is not supported; expected 8"),
        ("qwen2", {"use_mrope": True}, "use_mrope = true is not supported; expected false"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true is not supported; expected false"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types = "),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling = "),
        ("mistral", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; expected "silu"'),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 is out of range"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported; expected 0.0"),
        ("mixtral", {"num_experts_per_tok": 5}, "model.experts_active = 5 exceeds model.experts = 4"),
        ("llama", {"head_dim": 16}, "head_dim = 16 is not supported; expected 8"),
        ("llama", {"logit_scale": 2.0}, "logit_scale = 2.0 is unknown for this family; try to remove the key"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
        ("llama", {"model_type": "mamba"}, 'model_type = "mamba" is unknown; expected one of llama'),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping = null is not supported"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ("gemma2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters = "),
    ],
)
def test_what_a_family_does_not_compute_is_refused(family, change, message):
    with pytest.raises(ConfigError) as error:
        read({"model_type": family} | CONFIGS[family] | change)
    assert message in str(error.value)
