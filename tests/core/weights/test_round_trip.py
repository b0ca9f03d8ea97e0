"""Weights of transformers are imported, trained and exported, and transformers loads the result: equal logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.base.cli import main
from meshwright.base.models.registry import FAMILIES
from meshwright.core.checkpoint.inspect import select_intact
from meshwright.core.models.init import build_empty
from meshwright.core.weights.checkpoint_tensors import CheckpointTensors
from meshwright.core.weights.reader import WeightFolder
from tests.kit.huggingface_models import CONFIGS
from tests.kit.small_run import load_cpu_config

LAYOUTS = {"tensor": ["--layout.tensor=2", "--layout.replicate=1"], "shard": ["--layout.shard=parameters", "--ranks=2"]}
RUN = ["--data.kind=synthetic", "--data.samples=100", "--data.sequence=16", "--batch.global=4", "--launch.device=cpu"]
RUN += ["--steps=3", "--schedule.warmup=1", "--eval.every=0", "--checkpoint.seconds=0"]


def save_random_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **save) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family] | {"vocab_size": 68})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():  # norms and biases of one and zero would hide that they are exchanged
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, **save)


def trained_model(run: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The built-in model with the parameters of the newest checkpoint."""
    tensors = CheckpointTensors(select_intact(run, None))
    model = build_empty(load_cpu_config(run).model, dtype, "cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            bits = tensors.read(name, (0,) * tensor.ndim, tensor.shape)
            tensor.copy_(torch.from_numpy(bits.view(bits.dtype.str.replace("u", "f")).copy()))
    return model


@torch.no_grad()
def assert_equal_logits(run: Path, export: Path, dtype: torch.dtype, tolerance: float) -> None:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=dtype, **eager)
    ours = trained_model(run, dtype)
    if theirs.config.model_type == "gemma2":  # transformers has it in float32
        theirs.model.embed_tokens.embed_scale = torch.tensor(theirs.config.hidden_size**0.5, dtype=dtype)
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        ours.head.logits(ours.decoder(tokens)), theirs(tokens).logits, rtol=tolerance, atol=tolerance
    )


def round_trip(family: str, folder: Path, *settings: str) -> None:
    main(["checkpoint", "import", str(folder / "original"), "--run", str(folder / "run")])
    main(["train", str(folder / "run"), "--run", str(folder / "run"), *RUN, *settings])
    main(["checkpoint", "export", str(folder / "run"), "--to", str(folder / "export")])
    recorded = json.loads((folder / "run" / "identity.json").read_text())["identity"]
    assert recorded["model.family"] == family
    assert recorded["initial_weights"] == WeightFolder(folder / "original").digest


def test_llama_is_imported_trained_and_exported(tmp_path):
    save_random_model("llama", tmp_path / "original", max_shard_size="8KB")
    round_trip("llama", tmp_path, *LAYOUTS["tensor"])
    assert_equal_logits(tmp_path / "run", tmp_path / "export", torch.float32, 1e-5)
    before, after = WeightFolder(tmp_path / "original"), WeightFolder(tmp_path / "export")
    name = "decoder.blocks.1.ffn.up.weight"
    difference = after.read(name, (0, 0), (48, 32)) - before.read(name, (0, 0), (48, 32))
    assert 0 < difference.abs().max() < 0.02  # three steps of AdamW from the imported values


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_imported_trained_and_exported(family, layout, tmp_path, monkeypatch):
    """In float32, and in float64 without the casts to float32 in modules of transformers."""
    save_random_model(family, tmp_path / "original", torch.float64)
    round_trip(family, tmp_path, *layout, "--precision.compute=fp64")
    assert_equal_logits(tmp_path / "run", tmp_path / "export", torch.float32, 2e-5)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    assert_equal_logits(tmp_path / "run", tmp_path / "export", torch.float64, 1e-10)
