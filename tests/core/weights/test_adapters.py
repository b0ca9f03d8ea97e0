"""Fine-tuning of an imported model by low-rank adaptation: adapters load in peft, and exports have them merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.core.checkpoint.inspect import digest, find_published, run_config
from meshwright.core.weights.export import export_checkpoint
from meshwright.errors import CheckpointError, ConfigError, IdentityError
from tests.kit.small_run import load_cpu_config

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

VOCAB = 48
OPTIONS = [
    "--data.kind=synthetic",
    "--data.samples=100",
    "--data.sequence=16",
    "--batch.global=4",
    "--steps=4",
    "--lora.rank=3",
    "--lora.alpha=12",
    "--lora.targets=q_proj,*.ffn.down",
    "--optimizer.lr=0.05",
    "--checkpoint.every=2",
    "--checkpoint.mode=sync",
    "--eval.every=0",
    "--layout.shard=parameters",
]


def base_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=56,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a base model and a run that has fine-tuned it on two ranks."""
    root = tmp_path_factory.mktemp("tuned")
    base_model().save_pretrained(root / "base")
    config = load_cpu_config(overrides=[*OPTIONS, f"--init_from={root / 'base'}"], ranks=2)
    meshwright.train(config, run=root / "run")
    return root


def logits(model):
    with torch.no_grad():
        return model.double()(torch.arange(2 * 16).view(2, 16) % VOCAB).logits


def test_checkpoint_has_no_frozen_tensor(tuned):
    entry = find_published(tuned / "run", None)[0]
    names = {name.partition("/")[2] for name in entry.manifest.tensors}
    assert all(".lora_a" in name or ".lora_b" in name for name in names)
    elements = 2 * (3 * (32 + 32) + 3 * (56 + 32))
    stored = sum(region.length for name in entry.manifest.tensors for region in entry.index.regions(name))
    factors, moments, step_counts = 4 * elements, 2 * 4 * elements, 4 * 8
    assert stored == factors + moments + step_counts
    assert entry.manifest.base["weights"] == f"init_from = {tuned / 'base'}"


def test_peft_loads_the_adapter_with_equal_logits(tuned, tmp_path):
    config = run_config(tuned / "run")
    export_checkpoint(tuned / "run", tmp_path / "adapter", config, adapter=True)
    export_checkpoint(tuned / "run", tmp_path / "merged", config, format="huggingface")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (3, 12, ["down_proj", "q_proj"])
    assert settings["base_model_name_or_path"] == str(tuned / "base")
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    start, adapted = logits(base_model()), logits(loaded)
    assert (adapted - start).abs().max() > 1e-3
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-5, atol=1e-6)  # W + B A is rounded to float32 once
    own = transformers.AutoModelForCausalLM.from_pretrained(tuned / "base")
    assert torch.equal(merged.get_input_embeddings().weight, own.get_input_embeddings().weight)


def test_resume_reads_the_base_again_and_verifies_it(tuned, tmp_path):
    shutil.copytree(tuned / "run", tmp_path / "run")
    config = run_config(tuned / "run")
    for entry in find_published(tmp_path / "run", None):
        if entry.step > 2:  # as if the run had been killed
            shutil.rmtree(tmp_path / "run" / entry.folder)
    resumed = meshwright.train(config, run=tmp_path / "run")
    before, after = (digest(tuned / "run", 4), digest(tmp_path / "run", 4))
    assert before["digest"] == after["digest"]
    assert before["base"] == after["base"]
    assert resumed.steps == 4
    missing = replace(config, init_from=str(tmp_path / "gone"), steps=6)
    with pytest.raises(ConfigError, match="do not contain the frozen parameters"):
        meshwright.train(missing, run=tmp_path / "run")
    other = base_model()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(IdentityError, match="weights"):
        meshwright.train(replace(config, init_from=str(tmp_path / "other"), steps=6), run=tmp_path / "run")


def test_export_refuses_another_base(tuned, tmp_path):
    config = run_config(tuned / "run")
    with pytest.raises(CheckpointError, match="does not exist"):
        export_checkpoint(tuned / "run", tmp_path / "a", replace(config, init_from=str(tmp_path / "gone")))
    other = base_model()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="frozen parameters with digest"):
        export_checkpoint(tuned / "run", tmp_path / "b", replace(config, init_from=str(tmp_path / "other")))
    assert not any(Path(tmp_path / name).exists() for name in ("a", "b"))
