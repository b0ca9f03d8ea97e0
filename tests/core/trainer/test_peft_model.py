"""A transformers model that peft has wrapped trains as a custom model: its frozen parameters keep their bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import meshwright
from meshwright.errors import ConfigError
from tests.kit.small_run import load_cpu_config

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

OPTIONS = [
    "--steps=3",
    "--batch.global=4",
    "--optimizer.lr=0.01",
    "--eval.holdout=0",
    "--checkpoint.mode=sync",
    "--layout.shard=parameters",
]


def adapted_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=56,
    )
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), settings)


class Tokens:
    """Token sequences as transformers takes them: it shifts the labels itself."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = np.random.default_rng(index).integers(0, 48, 16)
        return {"input_ids": tokens, "labels": tokens}


def test_model_of_peft_trains_on_two_ranks_with_its_base_frozen(tmp_path):
    model = adapted_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = load_cpu_config(overrides=OPTIONS, ranks=2)
    result = meshwright.train(config, model=model, source=Tokens(), run=tmp_path / "run")
    changed = {name for name, parameter in result.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert any("lora_B" in name for name in changed)


def test_lora_of_a_custom_model_is_refused_with_a_pointer_to_peft(tmp_path):
    config = load_cpu_config(overrides=OPTIONS)
    lora = replace(config.lora, rank=4)
    with pytest.raises(ConfigError, match="get_peft_model"):
        meshwright.train(replace(config, lora=lora), model=adapted_model(), source=Tokens(), run=tmp_path / "run")
