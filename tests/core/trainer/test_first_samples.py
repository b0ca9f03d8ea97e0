"""Tests of meshwright.core.trainer.first_batch: large models, what a rank would not train, and declared means."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.core.data.batch_structure import CountRule
from meshwright.core.trainer.first_batch import first_samples
from meshwright.errors import ConfigError
from tests.core.trainer.first_batch_models import OwnLoss, check, language_model, linear, points, sequences, summed


def test_large_model_is_not_checked_and_says_so(monkeypatch):
    monkeypatch.setattr(first_samples, "MAX_FLOPS", 10)
    found = check(linear(), cross_entropy, points())
    [note] = found.notes
    assert note.startswith("the first batch is not checked: 16 passes of 67 parameters over 5 targets")
    assert found.returns_count  # it is compared at every step, if the loss returns one
    with pytest.raises(ConfigError, match=r"no entry of a sample is named labels, label, targets or target \(x, y\)"):
        check(OwnLoss("sum"), summed, [{"x": row, "y": label} for row, label in points()])


def test_sequences_of_a_large_model_are_shortened(monkeypatch):
    model = language_model()
    monkeypatch.setattr(first_samples, "SHORTENED_FLOPS", 1.0)
    monkeypatch.setattr(first_samples, "MIN_SEQUENCE", 4)
    lengths = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, keywords: lengths.append(keywords["input_ids"].shape), with_kwargs=True
    )

    def mean(outputs, batch):
        return cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())

    with pytest.raises(ConfigError, match="the loss is a mean"):
        check(model, mean, sequences())
    assert {shape[1] for shape in lengths} == {4}
    handle.remove()

    class FixedLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.positions = nn.Embedding(11, 11), nn.Parameter(torch.zeros(8, 11))

        def forward(self, input_ids):
            return self.embedding(input_ids) + self.positions

    [note] = check(FixedLength(), lambda o, b: summed(o.flatten(0, 1), b["labels"].flatten()), sequences()).notes
    assert note.endswith("the model fails on shorter sequences: RuntimeError")


def test_hook_on_a_parameter_is_refused():
    model = linear()
    model[0].weight.register_hook(lambda gradient: 0.1 * gradient)
    with pytest.raises(ConfigError, match=r"0\.weight has a hook on the tensor"):
        check(model, summed, points())


class InPlainList(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), [nn.Linear(4, 3)]

    def forward(self, x):
        return self.rest[0](self.first(x))


def test_parameters_that_are_never_updated_are_refused():
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3, 4\) receives a gradient and is not registered"):
        check(InPlainList(), summed, points())
    model = linear()
    with pytest.raises(ConfigError, match=r"still computes with 0\.weight of the original"):
        check(model, lambda o, t: summed(o, t) + 0 * model[0].weight.sum(), points())


def test_ignored_target_of_the_loss_is_not_counted():
    samples = [(row, abs(label) % 3) for row, label in points()]
    loss = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
    assert check(linear(), loss, samples).count == CountRule("valid", 1, ignored=0)
    assert check(linear(), partial(cross_entropy, ignore_index=0), samples, reduction="mean").count.ignored == 0


def test_declared_mean_is_checked_with_masked_and_shifted_labels():
    def mean(outputs, batch):
        return cross_entropy(outputs.logits.mT, batch["labels"])

    def mean_of_means(outputs, batch):
        losses = cross_entropy(outputs.logits.mT, batch["labels"], reduction="none")
        return (losses.sum(1) / (batch["labels"] != -100).sum(1)).mean()

    def shifting_mean(outputs, batch):
        return cross_entropy(outputs.logits[:, :-1].mT, batch["labels"][:, 1:])

    unmasked = sequences(shifted=True)
    assert check(language_model(), mean, unmasked, reduction="mean").count == CountRule("valid", 1)
    with pytest.raises(ConfigError, match="the loss is the mean of the means of its samples"):
        check(language_model(), mean_of_means, unmasked, reduction="mean")
    with pytest.raises(ConfigError, match="labels are shifted twice"):
        check(language_model(), shifting_mean, unmasked, reduction="mean")
    assert check(language_model(), shifting_mean, sequences(), reduction="mean").count == CountRule("shifted", 1)


def test_entry_that_the_model_does_not_take_is_named():
    samples = [{"x": row, "labels": label, "weight": 1.0} for row, label in points()]
    with pytest.raises(ConfigError, match="does not take weight, and there is no other use for it"):
        check(OwnLoss("sum"), None, samples)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    [note] = check(Named(), lambda o, b: summed(o, b["labels"]), samples).notes
    assert note == "forward of Named does not take weight: loss and metrics alone get it"
