"""Ranks compare the parallelized model with a plain pass over the first samples, and the comparison changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshwright import ParallelSpec
from meshwright.base.config import BatchConfig, LayoutConfig, PrecisionConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.trainer.first_batch import check
from meshwright.core.trainer.first_batch.gradient_sketch import GradientSketch
from meshwright.errors import ConfigError
from tests.core.trainer.first_batch_models import check as first_batch
from tests.core.trainer.first_batch_models import linear, sequences
from tests.core.trainer.test_given_objects import Momentum
from tests.kit.custom_model import custom_config, run_custom

EXACT = PrecisionConfig(compute="fp64")


class Tokens:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        row = np.random.default_rng(index).integers(0, 11, 9)
        return row[:-1], row[1:]


class FusedAttention(nn.Module):
    def __init__(self, heads_first):
        super().__init__()
        self.qkv, self.out, self.heads_first = nn.Linear(8, 24), nn.Linear(8, 8), heads_first

    def forward(self, x):
        fused = self.qkv(x).unflatten(-1, (-1, 3, 4) if self.heads_first else (3, -1, 4))
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(-2 if self.heads_first else -3))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, heads_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList([FusedAttention(heads_first) for _ in range(2)])

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def plan():
    return {"layers.*.qkv": ColwiseParallel(), "layers.*.out": RowwiseParallel()}


def run_decoder(folder, heads_first, **sections):
    config = custom_config(steps=1, layout=LayoutConfig(replicate=1, tensor=2), **sections)
    spec = ParallelSpec(blocks="layers.*", tp_plan=plan)
    return run_custom(folder, config, model=Decoder(heads_first), loss=token_loss, source=Tokens(), parallel_spec=spec)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_plan_that_cuts_a_fused_projection_into_wrong_parts_is_refused(tmp_path, compute):
    expected = (
        r"the first samples have the loss [\d.]+ and a gradient of layers\.\d\.\w+\.\w+ of norm [\d.]+ in one plain "
        r"process, and [\d.]+ and [\d.]+ on the layout tensor 2: look at layers.*.qkv, layers.*.out in "
    )
    with pytest.raises(ConfigError, match=expected) as failed:
        run_decoder(tmp_path / "run", heads_first=False, precision=PrecisionConfig(compute=compute))
    assert "\n" not in str(failed.value)
    assert not RunFolder(tmp_path / "run").identity_file.exists()


def test_plan_that_gives_each_rank_whole_heads_is_accepted(tmp_path):
    run_decoder(tmp_path / "fp64", heads_first=True, precision=EXACT)
    run_decoder(tmp_path / "bf16", heads_first=True, precision=PrecisionConfig(compute="bf16"))


class Stateful(nn.Module):
    """Draws dropout, keeps running statistics, and counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(F.dropout(self.norm(self.first(x)), 0.3, self.training) * (1 + 0.1 * self.calls))


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_comparison_changes_no_bit_of_the_run(tmp_path, monkeypatch, shard):
    layout = LayoutConfig(replicate=2, shard=shard)
    compared, records = run_custom(tmp_path / "compared", custom_config(3, layout=layout), model=Stateful())
    monkeypatch.setattr(check, "make_plain_pass", lambda *_: "off")
    alone, others = run_custom(tmp_path / "alone", custom_config(3, layout=layout), model=Stateful())
    assert compared.digest == alone.digest
    assert [record["loss"] for record in records] == [record["loss"] for record in others]


def test_teacher_and_counters_count_the_passes_of_steps_alone(tmp_path):
    class Both(Momentum):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    one, two = (
        run_custom(
            tmp_path / str(ranks),
            custom_config(3, ranks, batch=BatchConfig(global_=8, micro=8 // ranks), precision=EXACT),
            model=Both().double(),
        )[0].model
        for ranks in (1, 2)
    )
    for (name, alone), parallel in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.allclose(alone, parallel, rtol=1e-10, atol=0), name


def test_continuing_on_a_layout_that_loses_the_teacher_is_refused(tmp_path):
    run_custom(tmp_path / "run", custom_config(1, 1), model=Momentum())
    sharded = custom_config(2, layout=LayoutConfig(replicate=2, shard="optimizer"))
    with pytest.raises(ConfigError, match=r"forward changes teacher.weight, teacher.bias without the optimizer"):
        run_custom(tmp_path / "run", sharded, model=Momentum())


def test_sketch_sees_other_elements_another_norm_and_no_rounding():
    torch.manual_seed(0)
    gradient = torch.randn(300, 200, dtype=torch.float64)
    sketch = GradientSketch.of(gradient)
    assert sketch.error(GradientSketch.of(gradient * (1 + 1e-9)), 0.0) < 1e-8
    assert sketch.error(GradientSketch.of(gradient.flip(0)), 0.0) > 0.5
    assert sketch.error(GradientSketch.of(gradient * 2), 0.0) > 0.5
    sparse = torch.zeros_like(gradient)
    sparse[7] = gradient[7]
    assert GradientSketch.of(sparse).error(GradientSketch.of(sparse * (1 + 1e-9)), 0.0) < 1e-8


@pytest.mark.parametrize("rows", [64, 255, 300])
@pytest.mark.parametrize("columns", [64, 255, 300, 4096])
def test_sketch_sees_every_second_row_and_column(rows, columns):
    torch.manual_seed(0)
    gradient = torch.randn(rows, columns, dtype=torch.float64)
    sketch = GradientSketch.of(gradient)
    for row in (0, 1):
        for column in (0, 1):
            other = gradient.clone()
            other[row::2, column::2] *= -1
            assert sketch.error(GradientSketch.of(other), 0.0) > 0.3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_that_is_not_finite_is_another_one(value):
    gradient = torch.randn(300, 200)
    other = gradient.clone()
    other[7, 7] = value
    for one, two in ((gradient, other), (other, gradient), (other, other)):
        assert GradientSketch.of(one).error(GradientSketch.of(two), 0.0) == math.inf


class Large:
    """Targets whose squared error has gradients that overflow in fp16."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.random.default_rng(index).normal(size=4).astype(np.float32), np.full(3, 6e4, np.float32)


def squared_error(outputs, targets):
    return (outputs - targets).square().sum()


def test_gradients_that_fp16_has_with_a_loss_scale_alone_are_compared_and_accepted(tmp_path):
    config = custom_config(1, precision=PrecisionConfig(compute="fp16"))
    model = linear(nn.Linear(8, 8))
    run_custom(tmp_path / "run", config, model=model, loss=squared_error, source=Large())
    found = first_batch(model, squared_error, Large(), config=config)
    assert found.plain_pass.scale == 2.0**-8


@pytest.mark.parametrize(
    ("compute", "loss", "reason"),
    [
        ("fp16", lambda outputs, targets: (outputs * 1e7 - targets).abs().sum(), "the pass in fp16"),
        ("fp32", lambda outputs, _: (outputs - outputs.detach()).abs().sqrt().sum(), "the loss or a gradient"),
    ],
)
def test_pass_that_is_not_finite_is_named_as_not_compared(compute, loss, reason):
    config = custom_config(1, precision=PrecisionConfig(compute=compute))
    found = first_batch(linear(), loss, Large(), config=config)
    assert found.plain_pass is None
    assert any(note.endswith(f"not compared with a plain pass: {reason} is not finite") for note in found.notes)


class KeyBias(nn.Module):
    """Biases whose gradient is zero: softmax subtracts that of keys, the norm that before it, and the loss the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.layers = nn.ModuleList([self.q, self.k, self.v])
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 11)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = self.embedding(x)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.norm(x.flatten(0, 1))) + self.shift


def flat_token_loss(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten(), reduction="sum")


def key_bias_plan():
    return {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        (LayoutConfig(replicate=1, tensor=2), "fp32"),
        (LayoutConfig(replicate=2, shard="parameters"), "fp32"),
        (LayoutConfig(replicate=2), "bf16"),
    ],
)
def test_gradient_that_is_zero_but_for_rounding_is_accepted(tmp_path, layout, compute):
    spec = ParallelSpec(blocks="layers.*", tp_plan=key_bias_plan if layout.tensor > 1 else dict)
    config = custom_config(1, layout=layout, precision=PrecisionConfig(compute=compute))
    run_custom(tmp_path / "run", config, model=KeyBias(), loss=flat_token_loss, source=Tokens(), parallel_spec=spec)


class Advantages(Tokens):
    """Advantages that add up to zero over a sample."""

    def __getitem__(self, index):
        row = np.random.default_rng(index).normal(size=4).astype(np.float32)
        return row, np.array([3, -1, -2], np.float32)


class Ratio(nn.Module):
    """A ratio of probabilities that is one, as at the first step of a policy, but for the rounding on ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        logs = self.down(self.up(x).tanh())
        rounding = torch.finfo(torch.float32).eps * torch.distributed.is_initialized()
        return (logs - logs.detach()).exp() * (1 + rounding * (logs > 0))


def test_loss_that_is_zero_but_for_rounding_is_accepted(tmp_path):
    def loss(ratios, advantages):
        return (ratios * advantages).sum()

    run_custom(tmp_path / "run", custom_config(1), model=Ratio(), loss=loss, source=Advantages())


def test_keys_that_are_turned_in_float32_are_compared_with_the_tolerance_of_bf16(tmp_path):
    config = custom_config(1, layout=LayoutConfig(replicate=1, context=2), precision=PrecisionConfig(compute="bf16"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    run_custom(tmp_path / "run", config, model=model, loss=None, source=sequences() * 4)
