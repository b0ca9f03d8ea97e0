"""Weights of a folder are where a run starts: their config decides the model, and their content is identity."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright import train
from meshwright.base.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.base.models.initial_model import load_run_config, take_initial_model
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.inspect import select_intact
from meshwright.core.launch.job import make_job
from meshwright.core.weights.checkpoint_tensors import CheckpointTensors
from meshwright.errors import ConfigError, IdentityError
from tests.core.weights.weight_folders import DOWN, HEAD, MODEL, edit_tensors, make_folder
from tests.kit.custom_model import Points, custom_config, custom_model, summed_cross_entropy


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "weights")


def test_the_model_is_that_of_the_folder_and_not_of_the_preset(folder):
    config = load_run_config(None, ["--preset=small", f"--init_from={folder}", "--model.separator=3"])
    assert config.model == ModelConfig(**vars(MODEL) | {"separator": 3})
    assert take_initial_model(RunConfig(init_from=str(folder))).model == MODEL


@pytest.mark.parametrize(
    ("key", "given", "stored"),
    [("width", "16", "8"), ("tie", "true", "false"), ("norm_eps", "0.1", "1e-05"), ("family", "gemma2", '"llama"')],
)
def test_a_run_file_that_contradicts_the_folder_is_refused_with_both_values(key, given, stored, folder):
    with pytest.raises(ConfigError) as error:
        load_run_config(None, [f"--init_from={folder}", f"--model.{key}={given}"])
    assert f"model.{key} = " in str(error.value)
    assert given in str(error.value)
    assert f"config.json has {stored}; try to remove model.{key}" in str(error.value)


def test_a_path_in_a_run_file_is_relative_to_it(folder, tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('init_from = "weights"\n')
    monkeypatch.chdir("/")
    assert load_run_config(tmp_path / "run.toml").init_from == str(folder)
    monkeypatch.chdir(tmp_path)
    assert load_run_config(None, ["--init_from=weights"]).init_from == str(folder)


def test_a_folder_that_does_not_fit_is_refused_before_ranks_start(folder, tmp_path):
    config = load_run_config(None, [f"--init_from={folder}", "--data.kind=synthetic", "--data.sequence=8"])
    job = make_job(config, RunFolder(tmp_path / "run"))
    assert job.weights is not None
    edit_tensors(lambda tensors: tensors.pop(DOWN))(folder)
    with pytest.raises(ConfigError, match=f"lacks tensor {DOWN}"):
        make_job(config, RunFolder(tmp_path / "run"))
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="weights cannot be read: no such folder"):
        make_job(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_custom_model_starts_from_its_own_names_and_resumes_without_the_folder(tmp_path):
    """The model is on the meta device, and sharded."""
    weights = tmp_path / "weights"
    weights.mkdir()
    initial = {name: value * 0.5 for name, value in custom_model().state_dict().items()}
    save_file(initial, weights / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    config = custom_config(steps=0, layout=LayoutConfig(shard="parameters", replicate=2))
    code = {"model": model, "loss": summed_cross_entropy, "source": Points(), "run": tmp_path / "run", "quiet": True}
    train(config, init_from=weights, **code)
    saved = CheckpointTensors(select_intact(tmp_path / "run", None), "model.")
    for name, value in load_file(weights / "model.safetensors").items():
        assert np.array_equal(saved.read(name, (0,) * value.ndim, value.shape).view("<f4"), value.numpy()), name
    edit_tensors(lambda tensors: tensors["0.bias"].add_(1))(weights)
    longer = custom_config(steps=1, layout=config.layout)
    with pytest.raises(IdentityError, match="the content of the initial weights changed"):
        train(longer, init_from=weights, **code)
    with pytest.raises(IdentityError, match="were taken from a folder and are initialized from the seed"):
        train(longer, **code | {"model": custom_model()})
    shutil.rmtree(weights)
    assert train(longer, init_from=weights, **code | {"model": custom_model()}).steps == 1


def test_fresh_keeps_the_initial_weights_of_a_run_folder(tmp_path):
    make_folder(tmp_path / "run" / "initial")
    earlier = RunFolder(tmp_path / "run").set_aside()
    names = sorted(os.listdir(tmp_path / "run" / "initial"))
    assert names == sorted(os.listdir(earlier.root / "initial")) == ["config.json", "model.safetensors"]
    assert HEAD in load_file(tmp_path / "run" / "initial" / "model.safetensors")
