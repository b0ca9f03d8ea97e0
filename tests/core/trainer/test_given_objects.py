"""The copies of model and loss that ranks train compute what the user's own objects do, or the run is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.base.config import LayoutConfig, PrecisionConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.layout import Layout
from meshwright.core.launch.first_batch_check import require_kept_changes
from meshwright.core.trainer.custom_model import copy_module
from meshwright.core.trainer.first_batch import plain_pass
from meshwright.errors import ConfigError
from tests.core.trainer.first_batch_models import check, language_model, linear, points, sequences, summed


class Router(nn.Module):
    """Keeps an auxiliary loss in itself."""

    def __init__(self, aux=None):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        if aux is not None:
            self.aux = aux

    def forward(self, x):
        hidden = self.inner(x).relu()
        self.aux = hidden.square().sum()
        return self.head(hidden)


@pytest.mark.parametrize(
    ("aux", "found"), [(torch.zeros(()), r"train [\d.]+:"), (None, "train it raises AttributeError")]
)
def test_auxiliary_loss_that_is_read_through_a_closure_is_refused_with_both_losses(aux, found):
    model = Router(aux)
    expected = (
        rf"the loss of the first batch is [\d.]+ with the model and loss as given, .* ranks {found}.* in aux; try"
    )
    with pytest.raises(ConfigError, match=expected) as failed:
        check(model, lambda outputs, targets: summed(outputs, targets) + model.aux, points())
    assert "\n" not in str(failed.value)


def test_auxiliary_loss_without_a_value_is_refused_for_its_gradient():
    model = Router(torch.zeros(()))

    def loss(outputs, targets):
        return summed(outputs, targets) + model.aux - model.aux.detach()

    with pytest.raises(ConfigError, match=r"the norm of the gradient of inner.weight on the first batch is"):
        check(model, loss, points())


def test_auxiliary_loss_that_forward_returns_is_accepted():
    class Returned(Router):
        def forward(self, x):
            return super().forward(x), self.aux

    assert check(Returned(), lambda outputs, t: summed(outputs[0], t) + outputs[1], points()).count is not None


class Counted(nn.Module):
    """Computes something else in every call."""

    def __init__(self, drawn=False):
        super().__init__()
        self.calls = 0
        self.generator = torch.Generator().manual_seed(0) if drawn else None

    def forward(self, x):
        self.calls += 1
        return x + (torch.rand((), generator=self.generator) if self.generator is not None else 0.0 * self.calls)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
TEACHER = linear().requires_grad_(False)
MODELS = {
    "counter": lambda: (linear(Counted()), summed),
    "dropout": lambda: (linear(nn.Dropout(0.5)), summed),
    "batch norm": lambda: (linear(nn.BatchNorm1d(8)), summed),
    "synchronized batch norm": lambda: (linear(nn.SyncBatchNorm(8)), summed),
    "spectral norm": lambda: (linear(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), summed),
    "double": lambda: (linear().double(), summed),
    "bfloat16": lambda: (linear().bfloat16(), summed),
    "class weights": lambda: (linear(), lambda o, t: cross_entropy(o, t, WEIGHTS.to(o.dtype), reduction="sum")),
    "loss module": lambda: (linear(), nn.CrossEntropyLoss(reduction="sum")),
}


@pytest.mark.parametrize("name", MODELS)
def test_right_model_is_compared_and_accepted(name):
    assert not any("not compared" in note for note in check(*MODELS[name](), points()).notes)


def test_language_model_of_transformers_is_compared_and_accepted():
    assert check(language_model(), None, sequences()).notes == ()


def test_distillation_from_a_model_beside_it_is_accepted():
    inputs = {"x": None}

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = linear()

        def forward(self, x):
            inputs["x"] = x
            return self.layers(x)

    def loss(outputs, targets):
        teacher = TEACHER.to(outputs.dtype)(inputs["x"])
        return summed(outputs, targets) + (outputs - teacher).square().sum()

    assert check(Student(), loss, points()).changed == ()


def test_model_with_a_generator_of_its_own_is_not_refused():
    check(linear(Counted(drawn=True)), summed, points())


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("MAX_SECONDS", -1.0, "that would take 0 s on a CPU"),
        ("BYTES", 1 << 50, "that needs .* MiB of memory, and .* MiB are free"),
    ],
)
def test_what_needs_too_much_is_not_compared_and_named(monkeypatch, setting, value, reason):
    monkeypatch.setattr(plain_pass, setting, value)
    model = Router(torch.zeros(()))
    [note] = check(model, lambda outputs, targets: summed(outputs, targets) + model.aux, points()).notes
    assert re.search(f"are not compared with the copies that ranks train: {reason}", note)


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("layer", "config", "reason"),
    [
        (nn.Identity(), RunConfig(), ""),
        (nn.Dropout(0.5), RunConfig(), ""),
        (Drawing(), RunConfig(), "forward draws random numbers in evaluation mode too"),
        (nn.Identity(), RunConfig(init_from="weights"), "the initial weights are those of init_from"),
    ],
)
def test_pass_of_ranks_is_made_or_named_as_not_compared(layer, config, reason):
    config = with_device_defaults(config, "cpu", True)
    notes = [note for note in check(linear(layer), summed, points(), config=config).notes if "not compared" in note]
    assert notes == [f"the gradients of ranks are not compared with a plain pass: {reason}"] * bool(reason)


def test_given_objects_stay_as_they_are():
    model = linear(nn.BatchNorm1d(8), Counted())
    model(torch.randn(3, 4)).sum().backward()
    tensors = [*model.parameters(), *model.buffers()]
    before = [(t.data_ptr(), t.clone(), None if t.grad is None else t.grad.clone()) for t in tensors]
    check(model, summed, points())
    for tensor, (pointer, value, gradient) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == pointer
        assert torch.equal(tensor, value)
        assert gradient is None or torch.equal(tensor.grad, gradient)
    assert model[2].calls == 1


def test_model_that_was_called_before_can_be_copied():
    model = Router()
    model(torch.randn(2, 4))
    assert copy_module(model).aux.grad_fn is None


class Momentum(nn.Module):
    """A teacher that follows its student."""

    def __init__(self, through_data=False):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.teacher.requires_grad_(False)
        self.through_data = through_data

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for followed, own in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    (own.data if self.through_data else own).lerp_(followed, 0.5)
        return self.head(self.student(x) + self.teacher(x))


@pytest.mark.parametrize("through_data", [False, True])
def test_parameters_that_forward_changes_are_found(through_data):
    found = check(Momentum(through_data), summed, points())
    assert found.changed == ("teacher.weight", "teacher.bias")
    assert any("forward changes teacher.weight, teacher.bias" in note for note in found.notes)


@pytest.mark.parametrize(
    ("layout", "precision", "kept"),
    [
        (LayoutConfig(replicate=2), PrecisionConfig(compute="fp32"), True),
        (LayoutConfig(replicate=1), PrecisionConfig(compute="fp32"), True),
        (LayoutConfig(replicate=2), PrecisionConfig(compute="bf16", weights="bf16"), False),
        *(
            (LayoutConfig(replicate=2, shard=s), PrecisionConfig(compute="fp32"), False)
            for s in ("optimizer", "gradients", "parameters")
        ),
        (LayoutConfig(replicate=1, tensor=2), PrecisionConfig(compute="fp32"), False),
    ],
)
def test_change_by_forward_is_refused_where_the_layout_loses_it(layout, precision, kept):
    config = RunConfig(layout=layout, precision=precision)
    if kept:
        require_kept_changes(("teacher.weight",), config, Layout.from_config(layout))
        return
    with pytest.raises(ConfigError, match=r"forward changes teacher.weight without the optimizer.*; try "):
        require_kept_changes(("teacher.weight",), config, Layout.from_config(layout))
    require_kept_changes((), config, Layout.from_config(layout))


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_advice_about_the_reduction_of_a_loss_with_class_weights_leads_out(reduction):
    mean, total = (nn.CrossEntropyLoss(WEIGHTS, reduction=kind) for kind in ("mean", "sum"))
    with pytest.raises(ConfigError, match=r'try .*reduction="sum" in the loss') as failed:
        check(linear().float(), mean, points(), reduction=reduction)
    assert (reduction is None) == ('train(..., reduction="mean") if it is the plain mean' in str(failed.value))
    check(linear(), total, points())
    with pytest.raises(ConfigError, match=r"try train\(...\) without reduction"):
        check(linear(), total, points(), reduction="mean")
