"""Tests of torch.compile of blocks and of whole models, and of the folder of compiled code."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.compile import CACHE_VARIABLE, use_compile_cache
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import attention_backends, default_compile_cache, use_attention_backends
from meshwright.core.trainer.build import build_parallel_decoder
from meshwright.core.trainer.first_batch.attention_calls import BACKENDS
from meshwright.core.trainer.precision import Precision
from tests.kit.small_run import small_config

COMPILE = torch.compile


@pytest.fixture
def aot_eager(monkeypatch):
    """The graphs that TorchInductor would compile, run as they are: its C++ compiler takes minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **_options: COMPILE(function, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def first_pass(*overrides, layers=2):
    """The loss and the gradients of a micro-batch, and the number of compiled graphs."""
    config = small_config("--layout.replicate=1", f"--model.layers={layers}", *overrides, ranks=1)
    model = build_parallel_decoder(
        config, Layout.from_config(config.layout), Precision(config.precision, torch.device("cpu")), World()
    )
    tokens = torch.arange(32).view(2, 16) % config.model.vocab
    counters.clear()
    loss, _ = model(tokens, tokens)
    loss.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return loss.detach(), gradients, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_model_has_the_gradients_of_the_eager_one(scope, aot_eager):
    loss, gradients, _ = first_pass()
    compiled_loss, compiled, graphs = first_pass("--compile.enabled=true", f"--compile.scope={scope}")
    assert graphs == 1
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-5)


def test_blocks_of_changing_shapes_are_one_graph_each(aot_eager):
    config = small_config("--layout.replicate=1", "--model.layers=2", "--compile.enabled=true", ranks=1)
    model = build_parallel_decoder(
        config, Layout.from_config(config.layout), Precision(config.precision, torch.device("cpu")), World()
    )
    counters.clear()
    for batch, sequence in ((2, 16), (4, 32), (3, 24)):
        tokens = torch.arange(batch * sequence).view(batch, sequence) % config.model.vocab
        model(tokens, tokens)[0].backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # of the first shape, and of all others


def test_equal_blocks_share_one_graph(aot_eager):
    for layers in (2, 12):
        assert first_pass("--compile.enabled=true", layers=layers)[2] == 1
        torch._dynamo.reset()


def test_compiled_code_is_kept_in_a_private_folder_of_the_user(home, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, default_compile_cache())
    (home / "compile").mkdir(parents=True, mode=0o777)
    use_compile_cache()
    assert os.environ[CACHE_VARIABLE] == str(home / "compile")
    assert stat.S_IMODE((home / "compile").stat().st_mode) == 0o700


def test_compiled_code_is_not_kept_where_somebody_else_decides(home, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, default_compile_cache())
    home.mkdir(parents=True)
    (home / "compile").symlink_to(tmp_path)
    use_compile_cache()
    assert os.environ[CACHE_VARIABLE] == default_compile_cache()


def test_folder_of_compiled_code_that_is_set_is_kept(home, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    use_compile_cache()
    assert os.environ[CACHE_VARIABLE] == str(tmp_path)
    assert not home.exists()


def test_order_of_attention_backends_is_part_of_the_key_of_compiled_code():
    before = attention_backends()
    with torch.compiler.config.patch(cache_key_tag=""):
        try:
            use_attention_backends([BACKENDS["math"], *BACKENDS.values()])
            math = torch.compiler.config.cache_key_tag
            use_attention_backends([BACKENDS["cudnn"], *BACKENDS.values()])
            assert len({"", math, torch.compiler.config.cache_key_tag}) == 3
        finally:
            use_attention_backends(before)
