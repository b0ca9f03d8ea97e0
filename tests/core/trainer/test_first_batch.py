"""Tests of meshwright.core.trainer.first_batch: what is wrong by construction is refused or named before a step."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from meshwright.base.config import DDPConfig, LayoutConfig, PrecisionConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.layout import Layout
from meshwright.core.data.batch_structure import CountRule
from meshwright.core.data.source import IndexableSource
from meshwright.core.launch.first_batch_check import prepare_custom_model
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.first_batch.check import FirstBatch
from meshwright.core.trainer.first_batch.model_notes import dtype_notes, model_notes
from meshwright.errors import ConfigError, RankError
from tests.core.trainer.first_batch_models import OwnLoss, check, language_model, linear, points, sequences, summed


def test_parameters_of_another_dtype_than_the_trained_one_are_named():
    model = linear().bfloat16()
    assert dtype_notes(model, PrecisionConfig(compute="fp32")) == [
        "4 of 4 parameters are not float32 (0.weight is bfloat16) and are trained as float32, because "
        "precision.compute = fp32"
    ]
    assert dtype_notes(linear(), PrecisionConfig(compute="bf16")) == []


class DictModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def test_loss_that_takes_a_tensor_is_told_that_it_gets_the_batch_of_dict_samples():
    samples = [{"x": row, "labels": label} for row, label in points()]
    expected = r"the loss raised TypeError: .*; expected loss\(outputs, batch\) .* x, labels"
    with pytest.raises(ConfigError, match=expected) as failed:
        check(DictModel(), cross_entropy, samples)
    assert "\n" not in str(failed.value)


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


def test_model_on_the_meta_device_is_checked_with_its_initial_values():
    with pytest.raises(ConfigError, match="the loss is a mean"):
        check(linear().to("meta"), cross_entropy, points(), init=lambda name, tensor: tensor.normal_())


def test_check_in_a_process_of_its_own_reports_unused_parameters_and_failures_of_the_model():
    source = IndexableSource(points())
    custom = CustomModel(Blocks(), summed, ParallelSpec(blocks="layers.*"))
    config = with_device_defaults(RunConfig(layout=LayoutConfig(replicate=2)), "cpu")
    layout = Layout.from_config(config.layout)
    with pytest.raises(ConfigError) as failed:
        prepare_custom_model(custom, source, config, layout)
    assert "unused.weight and 1 more got no gradient from the first batch" in str(failed.value)
    with pytest.raises(RankError, match="RuntimeError: mat1 and mat2 shapes cannot be multiplied") as failed:
        prepare_custom_model(replace(custom, module=nn.Linear(5, 3), spec=ParallelSpec()), source, config, layout)
    assert "in forward" in failed.value.traceback
    used = replace(config, ddp=DDPConfig(find_unused_parameters=True))
    assert prepare_custom_model(custom, source, used, layout).unit == "samples"
