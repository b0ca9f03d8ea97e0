"""Jobs are refused before ranks start, in one line that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config import load_config
from meshwright.errors import ConfigError
from meshwright.launch.job import make_job
from meshwright.telemetry.run_folder import RunFolder


def job(tmp_path, *overrides, **arguments):
    return make_job(
        load_config(overrides=["--launch.device=cpu", *overrides]), RunFolder(tmp_path / "run"), **arguments
    )


def test_model_that_exceeds_the_host_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"parameters and optimizer state of 2 ranks need at least .*; try a smaller"):
        job(tmp_path, "--model.experts=1000000")


def test_compile_without_a_cpp_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ConfigError, match="no-such-compiler is not on PATH; try to install g"):
        job(tmp_path, "--compile.enabled=true")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        job(tmp_path, "--compile.enabled=true")
    assert job(tmp_path).model is None


def test_user_model_on_the_meta_device_is_refused(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"meta device \(weight and 1 more tensors\).*try model.to_empty"):
        job(tmp_path, "--layout.replicate=1", model=model, loss=lambda out, targets: (out - targets).square().sum())
