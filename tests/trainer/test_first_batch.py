"""Tests of meshwright.trainer.first_batch: what is wrong by construction is refused or named before a step."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from meshwright.config import DDPConfig, LayoutConfig, RunConfig
from meshwright.data.batch_structure import CountRule
from meshwright.data.source import IndexableSource, find_structure
from meshwright.errors import ConfigError, RankError
from meshwright.launch.first_batch_check import prepare_custom_model
from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.topology.layout import Layout
from meshwright.trainer.custom_model import CustomModel
from meshwright.trainer.first_batch import first_samples
from meshwright.trainer.first_batch.check import FirstBatch, check_first_batch
from meshwright.trainer.first_batch.model_notes import model_notes


def check(model, loss, samples, collate=None, blocks="", **options) -> FirstBatch:
    source = IndexableSource(samples, collate=collate)
    spec = ParallelSpec(blocks=blocks)
    structure = find_structure(source, collate)
    return check_first_batch(CustomModel(model, loss, spec, structure, collate, **options), source)


def points(count: int = 8, **extra):
    """Tuples of four numbers and a class; a label is ignored."""
    rows = np.random.default_rng(0).normal(size=(count, 4))
    return [(row, -100 if i == 1 else i % 3) for i, row in enumerate(rows)]


def sequences(shifted: bool = False, ignored: bool = True):
    """Dicts of tokens and labels that equal the tokens, or the next tokens."""
    rows = np.random.default_rng(0).integers(0, 11, size=(6, 9))
    labels = np.where((rows % 5 == 0) & ignored, -100, rows)
    if shifted:
        return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return [{"input_ids": row[:-1], "labels": label[:-1]} for row, label in zip(rows, labels, strict=True)]


def summed(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


def linear(*layers) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def language_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))


def test_sum_is_accepted():
    assert check(linear(), summed, points()) == FirstBatch(CountRule("valid", 1), "samples", (), "sum")


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (cross_entropy, "the loss is a mean: the loss of 5 samples is "),
        (lambda o, t: summed(o, t) / len(t), "the loss is a mean over samples: "),
        (lambda o, t: summed(o, t) * len(t), "the loss depends on which samples are in a batch: "),
        (lambda o, t: summed(o, t) + o.mean(), "the loss depends on which samples are in a batch: "),
        (lambda o, t: (o @ o.T).logsumexp(1).sum(), "the loss depends on which samples are in a batch: "),
    ],
)
def test_loss_that_is_not_a_sum_is_refused_with_the_factor(loss, found):
    with pytest.raises(ConfigError) as failed:
        check(linear(), loss, points())
    assert found in str(failed.value)
    assert re.search(r"adds up to \S+ \(factor [\d.]+\)", str(failed.value))


def test_mean_is_mended_by_one_word():
    with pytest.raises(ConfigError, match=r'try reduction="sum" in the loss, or train\(..., reduction="mean"\)'):
        check(linear(), cross_entropy, points())
    assert check(linear(), cross_entropy, points(), reduction="mean").reduction == "mean"
    with pytest.raises(ConfigError, match="declared as a mean and is none"):
        check(linear(), summed, points(), reduction="mean")


class AlwaysRandom(nn.Module):
    def forward(self, x):
        return x + 0.01 * torch.randn_like(x)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), AlwaysRandom()])
def test_randomness_in_forward_is_allowed_for(layer):
    assert check(linear(layer), summed, points()).notes == ()
    with pytest.raises(ConfigError, match="factor"):
        check(linear(layer), lambda o, t: summed(o, t) * len(t), points())


def test_batch_statistics_are_named_and_synchronized_ones_are_not():
    model = linear(nn.BatchNorm1d(8))
    [note] = check(model, summed, points()).notes
    assert note.startswith("1 normalize by the statistics of each rank")
    assert "convert_sync_batchnorm" in note
    assert check(nn.SyncBatchNorm.convert_sync_batchnorm(model), summed, points()).notes == ()


def test_forward_that_mixes_samples_in_training_mode_is_named():
    class Centered(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if self.training else x

    [note] = check(linear(Centered()), summed, points()).notes
    assert note.startswith("in training mode the loss of a sample depends on the other samples of its micro-batch")


def test_model_of_transformers_is_asked_for_the_sum():
    found = check(language_model(), None, sequences())
    assert (found.count, found.unit, found.reduction, found.notes) == (CountRule("shifted", 1), "tokens", "sum", ())


def test_labels_that_are_shifted_twice_are_refused():
    with pytest.raises(ConfigError, match="labels are shifted twice"):
        check(language_model(), None, sequences(shifted=True))

    def shifting_loss(outputs, batch):
        return summed(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    with pytest.raises(ConfigError, match="labels are shifted twice"):
        check(language_model(), shifting_loss, sequences(shifted=True))
    assert check(language_model(), shifting_loss, sequences()).count == CountRule("shifted", 1)


def test_labels_that_nothing_shifts_are_named():
    def loss(outputs, batch):
        return summed(outputs.logits.flatten(0, 1), batch["labels"].flatten())

    [note] = check(language_model(), loss, sequences()).notes
    assert "the model learns to copy its input" in note
    assert check(language_model(), loss, sequences(shifted=True)).notes == ()


class OwnLoss(nn.Module):
    """A model that computes a loss of a given reduction itself."""

    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = nn.Linear(4, 3), reduction

    def forward(self, x, labels):
        return SimpleNamespace(loss=cross_entropy(self.layer(x), labels, reduction=self.reduction))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduction_of_a_loss_that_the_model_computes_is_found(reduction):
    samples = [{"x": row, "labels": label} for row, label in points()]
    assert check(OwnLoss(reduction), None, samples).reduction == reduction


def test_count_of_the_loss_names_the_entry_that_it_counts():
    samples = [{"x": row, "y": abs(label), "mask": i % 2} for i, (row, label) in enumerate(points())]

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).sum(1)

    def masked(outputs, batch):
        return (outputs * batch["mask"]).sum(), batch["mask"].sum()

    found = check(Named(), masked, samples)
    assert (found.count, found.returns_count) == (CountRule("nonzero", 0), True)
    with pytest.raises(ConfigError, match="the loss returned no count, and no entry of a sample is named labels"):
        check(Named(), lambda o, b: (o * b["mask"]).sum(), samples)
    with pytest.raises(ConfigError, match="the loss counted 17 valid targets, but the batch has 5"):
        check(Named(), lambda o, b: (o.sum(), 17), samples)


def test_dict_by_position_is_refused():
    samples = [{"labels": label, "inputs": row} for row, label in points()]
    with pytest.raises(ConfigError, match="needs input, and samples have the entries labels, inputs"):
        check(nn.Linear(4, 3), lambda o, b: summed(o, b["labels"]), samples)


def test_several_losses_are_named():
    def losses(outputs, targets):
        return {"class": summed(outputs, targets), "size": outputs.pow(2).sum()}

    assert check(linear(), losses, points()).loss_names == ("class", "size")
    with pytest.raises(ConfigError, match="a dict of sums"):
        check(linear(), lambda o, t: (summed(o, t), o.sum()), points())


class Blocks(nn.Module):
    def __init__(self, detached: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused, self.detached = nn.Linear(4, 4), detached

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if index == 2 and self.detached else x)
        return x


def test_parameters_without_a_gradient_are_named():
    found = check(Blocks(), summed, points(), blocks="layers.*")
    assert found.notes == ("no gradient on the first batch for unused.bias, unused.weight",)
    assert found.unused == ("unused.weight", "unused.bias")


def test_block_that_no_gradient_reaches_is_named():
    notes = check(Blocks(detached=True), summed, points(), blocks="layers.*").notes
    assert [note.split(":")[0] for note in notes[:2]] == [
        "no gradient reaches layers.0",
        "no gradient reaches layers.1",
    ]


def test_frozen_parameters_are_named():
    model = linear()
    model[0].requires_grad_(False)
    assert check(model, summed, points()).notes == ("2 of 4 parameters are frozen: 0.weight, 0.bias",)


def test_ties_that_an_initialization_has_broken_are_named():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens)).mT

    samples = [(np.arange(i, i + 5) % 11, np.arange(i + 1, i + 6) % 11) for i in range(6)]
    model = Tied()
    assert check(model, summed, samples).notes == ()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2)
    assert model_notes(encoder, ParallelSpec()) == []  # its layers are copies of one
    layers = nn.ModuleList(deepcopy(nn.ModuleList([model.embedding, nn.Linear(8, 11, bias=False)])) for _ in range(2))
    layers[1][1].weight = nn.Parameter(model.embedding.weight.detach().clone())
    assert model_notes(nn.ModuleDict({"layers": layers}), ParallelSpec(blocks="layers.*")) == []
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    [note] = check(model, summed, samples).notes
    assert note.startswith("embedding.weight and head.weight have equal values and are two parameters")

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, tie_word_embeddings=True, **sizes))
    assert check(llama, None, sequences()).notes == ()
    llama.lm_head.weight = nn.Parameter(torch.randn(11, 16))
    with pytest.raises(ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight are two parameters"):
        check(llama, None, sequences())


def padded(samples):
    longest = max(len(s["tokens"]) for s in samples)
    tokens = np.stack([np.pad(s["tokens"], (0, longest - len(s["tokens"]))) for s in samples])
    return {"tokens": tokens, "labels": np.array([s["labels"] for s in samples])}


class Average(nn.Module):
    """Averages the embeddings of a sentence, with or without its padding."""

    def __init__(self, masked: bool):
        super().__init__()
        self.embedding, self.masked = nn.Embedding(11, 2), masked

    def forward(self, tokens):
        kept = (tokens != 0).unsqueeze(-1) if self.masked else torch.ones_like(tokens).unsqueeze(-1)
        return (self.embedding(tokens) * kept).sum(1) / kept.sum(1)


def test_loss_that_depends_on_padding_is_named():
    samples = [{"tokens": np.arange(1, 9 - i), "labels": i % 2} for i in range(6)]

    def loss(outputs, batch):
        return summed(outputs, batch["labels"])

    assert check(Average(masked=True), loss, samples, padded).notes == ()
    [note] = check(Average(masked=False), loss, samples, padded).notes
    assert note.startswith("the loss of a sample depends on the padding of its batch")


def test_regression_counts_samples():
    samples = [(row, row[:2]) for row, _ in points()]
    found = check(nn.Linear(4, 2), lambda o, t: mse_loss(o, t, reduction="sum"), samples)
    assert (found.unit, found.notes) == ("samples", ())


def test_loss_that_is_not_finite_is_left_to_the_first_step():
    samples = [(np.full(4, np.nan), 0) for _ in range(6)]
    assert check(linear(), summed, samples).notes == ()


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


def test_model_on_the_meta_device_is_checked_with_its_initial_values():
    with pytest.raises(ConfigError, match="the loss is a mean"):
        check(linear().to("meta"), cross_entropy, points(), init=lambda name, tensor: tensor.normal_())


def test_check_in_a_process_of_its_own_reports_unused_parameters_and_failures_of_the_model():
    source = IndexableSource(points())
    custom = CustomModel(Blocks(), summed, ParallelSpec(blocks="layers.*"))
    config = RunConfig(layout=LayoutConfig(replicate=2))
    layout = Layout.from_config(config.layout)
    with pytest.raises(ConfigError) as failed:
        prepare_custom_model(custom, source, config, layout)
    assert "unused.weight and 1 more got no gradient from the first batch" in str(failed.value)
    with pytest.raises(RankError, match="RuntimeError: mat1 and mat2 shapes cannot be multiplied") as failed:
        prepare_custom_model(replace(custom, module=nn.Linear(5, 3), spec=ParallelSpec()), source, config, layout)
    assert "in forward" in failed.value.traceback
    used = replace(config, ddp=DDPConfig(find_unused_parameters=True))
    assert prepare_custom_model(custom, source, used, layout).unit == "samples"
