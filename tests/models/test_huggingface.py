"""Every family reads and writes the config.json and the tensor names of its Hugging Face model."""

from __future__ import annotations

import json

import pytest
from huggingface_models import CONFIGS
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.config import ModelConfig
from meshwright.errors import ConfigError
from meshwright.models.config_fields import ConfigFields
from meshwright.models.registry import (
    FAMILIES,
    model_spec,
    read_huggingface_model,
    stored_parameters,
    write_huggingface_config,
)


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


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; expected "silu"'),
        ("llama", {"attention_bias": True}, "attention_bias = true is not supported; expected false"),
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
