"""Tests of meshwright.core.trainer.objective: what model, loss and metrics get of a batch, and what the sums are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.data.loader import target_count
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.trainer.custom_model import CustomModel, copy_trained_weights
from meshwright.core.trainer.objective import Objective
from meshwright.errors import ConfigError, DataError

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Towers(nn.Module):
    """Two inputs whose order matters."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, item, query):
        return {"score": self.left(item) - 2 * self.right(query)}


@dataclass
class Example:
    query: torch.Tensor
    item: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor


def example(samples: int = 4) -> Example:
    generator = torch.Generator().manual_seed(0)
    query, item = torch.randn(2, samples, 2, generator=generator)
    return Example(query, item, torch.arange(samples) % 3, torch.rand(samples, generator=generator))


def weighted(outputs, batch):
    return (cross_entropy(outputs["score"], batch.target, reduction="none") * batch.weight).sum()


def test_dataclass_is_passed_by_keyword_and_the_loss_gets_the_batch():
    torch.manual_seed(0)
    model, batch = Towers(), example()
    structure = BatchStructure.of(batch)
    total, count = Objective(model, weighted, structure)(*structure.flatten(batch))
    assert torch.equal(total, weighted(model(item=batch.item, query=batch.query), batch))
    assert int(count) == 0  # the loss returned none


def test_dict_order_does_not_change_the_loss():
    torch.manual_seed(0)
    model, batch = Towers(), vars(example())
    structure = BatchStructure.of(batch)
    objective = Objective(model, lambda out, b: cross_entropy(out["score"], b["target"], reduction="sum"), structure)
    other = dict(reversed(batch.items()))
    assert torch.equal(objective(*structure.flatten(batch))[0], objective(*structure.flatten(other))[0])


def test_dict_without_the_arguments_of_forward_is_refused():
    with pytest.raises(ConfigError) as failed:
        Objective(Towers(), weighted, BatchStructure.of({"labels": 0, "a": 1, "query": 2}))
    assert "forward of Towers needs item, and samples have the entries labels, a, query" in str(failed.value)


class OwnLoss(nn.Module):
    def forward(self, x, mask=None, labels=None):
        raise NotImplementedError


def test_entry_that_nothing_takes_is_refused():
    model = OwnLoss()
    model.layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"forward of OwnLoss does not take maks \(similar: mask\), and there is"):
        Objective(model, None, BatchStructure.of({"labels": 0, "x": 1, "maks": 2}))
    Objective(model, None, BatchStructure.of({"labels": 0, "x": 1, "mask": 2}))
    Objective(model, weighted, BatchStructure.of({"labels": 0, "x": 1, "maks": 2}))  # the loss gets it


def test_several_losses_are_added_and_measured():
    model, batch = Towers(), vars(example())
    structure = BatchStructure.of(batch)

    def losses(out, b):
        return {"class": cross_entropy(out["score"], b["target"], reduction="sum"), "size": out["score"].pow(2).sum()}

    objective = Objective(model, losses, structure, loss_names=("class", "size"))
    total, _ = objective(*structure.flatten(batch))
    first, first_count, second, second_count = objective.pop_measured(torch.device("cpu")).tolist()
    assert first + second == pytest.approx(total.item())
    assert first_count == second_count == 4


def test_mean_is_turned_into_a_sum_by_the_count():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 3), torch.randn(5, 2), torch.tensor([0, 1, -100, 2, -100])
    total, _ = Objective(model, nn.CrossEntropyLoss(), reduction="mean")(x, y)
    expected, _ = Objective(model, nn.CrossEntropyLoss(reduction="sum"))(x, y)
    assert float(total) == pytest.approx(float(expected))


def test_metrics_are_summed_over_micro_batches():
    def accuracy(outputs, targets):
        return (outputs.argmax(1) == targets).sum(), len(targets)

    metrics = {"accuracy": accuracy, "size": lambda outputs, targets: outputs.abs().sum(1)}
    model, x, y = nn.Linear(2, 3), torch.randn(6, 2), torch.arange(6) % 3
    objective = Objective(model, lambda o, t: cross_entropy(o, t, reduction="sum"), metrics=metrics)
    objective(x[:4], y[:4])
    objective(x[4:], y[4:])
    right, count, size, samples = objective.pop_measured(torch.device("cpu")).tolist()
    assert (right, count, samples) == (int((model(x).argmax(1) == y).sum()), 6, 6)
    assert size == pytest.approx(float(model(x).abs().sum()))
    assert objective.pop_measured(torch.device("cpu")).tolist() == [0, 0, 0, 0]


def test_count_of_the_loss_is_compared_at_every_step():
    def loss(outputs, targets):
        return cross_entropy(outputs, targets, reduction="sum"), len(targets)  # counts targets that are ignored

    objective = Objective(nn.Linear(2, 3), loss, returns_count=True)
    objective(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    assert objective.measured_values(objective.pop_measured(torch.device("cpu")).tolist(), 4, "step 0") == {}
    objective(torch.randn(4, 2), torch.tensor([0, 1, 2, -100]))
    with pytest.raises(DataError, match="step 1: the loss counted 4 valid targets, and the batch has 3"):
        objective.measured_values(objective.pop_measured(torch.device("cpu")).tolist(), 3, "step 1")
    objective.loss = nn.CrossEntropyLoss(reduction="sum")  # a model that was not checked: the loss returns no count
    objective(torch.randn(4, 2), torch.tensor([0, 1, 2, -100]))
    assert objective.measured_values(objective.pop_measured(torch.device("cpu")).tolist(), 3, "step 2") == {}


def test_metric_without_a_count_is_refused():
    objective = Objective(nn.Linear(2, 3), lambda o, t: o.sum(), metrics={"accuracy": lambda o, t: 0.5})
    with pytest.raises(ConfigError, match="metric accuracy returned a float"):
        objective(torch.ones(1, 2), torch.ones(1))


TOKENS = torch.arange(24).reshape(3, 8) % 11
LABELS = torch.where(TOKENS % 5 == 0, -100, TOKENS)


class LlamaOfAUser(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


def text_model(name):
    torch.manual_seed(0)
    kinds = {
        "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(vocab_size=11, **SMALL)),
        "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2)),
        "BERT": (transformers.BertForMaskedLM, transformers.BertConfig(vocab_size=11, **SMALL)),
        "BART decoder": (
            transformers.BartForCausalLM,
            transformers.BartConfig(vocab_size=11, d_model=16, decoder_layers=1, decoder_attention_heads=2),
        ),
        "subclass": (LlamaOfAUser, transformers.LlamaConfig(vocab_size=11, **SMALL)),
    }
    kind, config = kinds[name]
    return kind(config).eval()


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "BART decoder", "subclass"])
def test_model_of_transformers_returns_the_sum_over_the_labels_that_it_predicts(name):
    model, batch = text_model(name), {"input_ids": TOKENS, "labels": LABELS}
    custom = CustomModel(model, None, ParallelSpec(blocks=""), BatchStructure.of(batch))
    objective = custom.build_objective(torch.device("cpu"), torch.float32).eval()
    flat = custom.batch.flatten(batch)
    logits = model(input_ids=TOKENS).logits
    if name in ("BERT", "BART decoder"):
        expected, targets = cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum"), LABELS
    else:
        targets = LABELS[:, 1:]
        expected = cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(objective(*flat)[0]) == pytest.approx(float(expected), rel=1e-6)
    assert int(target_count(custom.batch.count, flat)) == int((targets != -100).sum())


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_encoder_decoder_of_transformers_counts_every_label(name):
    torch.manual_seed(0)
    if name == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=11, decoder_start_token_id=0, **sizes)
        )
    else:
        ends = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.BartConfig(
            vocab_size=11, d_model=16, **ends, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2
        )
        model = transformers.BartForConditionalGeneration(config)
    batch = {"input_ids": TOKENS, "labels": LABELS}
    custom = CustomModel(model, None, ParallelSpec(blocks=""), BatchStructure.of(batch))
    objective = custom.build_objective(torch.device("cpu"), torch.float32).eval()
    logits = model.eval()(**batch).logits
    expected = cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")
    flat = custom.batch.flatten(batch)
    assert float(objective(*flat)[0]) == pytest.approx(float(expected), rel=1e-6)
    assert int(target_count(custom.batch.count, flat)) == int((LABELS != -100).sum())


class WeightedLoss(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(3, 3)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, outputs, targets):
        return cross_entropy(self.classes(outputs), targets, self.weight, reduction="sum")


def test_loss_module_has_the_dtype_of_the_model():
    custom = CustomModel(nn.Linear(2, 3), WeightedLoss(), ParallelSpec(blocks=""))
    objective = custom.build_objective(torch.device("cpu"), torch.float64)
    total, _ = objective(torch.ones(4, 2), torch.arange(4) % 3)
    assert total.dtype == torch.float64


class UnusualState(nn.Linear):
    """Its state_dict contains copies, and a value that is no tensor."""

    def __init__(self):
        super().__init__(2, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def state_dict(self, *args, **options):
        return {name: copy.deepcopy(value) for name, value in super().state_dict(*args, **options).items()}

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


def test_trained_weights_are_copied_into_the_parameters_and_persistent_buffers():
    custom = CustomModel(UnusualState(), WeightedLoss(), ParallelSpec(blocks=""))
    objective = custom.build_objective(torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for tensor in (*objective.parameters(), *objective.buffers()):
            tensor.fill_(7.0)
    copy_trained_weights(objective, {}, custom.modules(), write=True, pipeline=None)
    model, loss = custom.modules()
    copied = (model.weight, model.bias, model.steps, loss.classes.weight, loss.weight)
    assert all(bool((tensor == 7.0).all()) and tensor.dtype == torch.float32 for tensor in copied)
    assert model.scratch == 0


def test_labels_that_arrive_shifted_are_not_shifted_again():
    model, batch = text_model("Llama"), {"input_ids": TOKENS, "labels": LABELS}
    custom = CustomModel(model, None, ParallelSpec(blocks=""), BatchStructure.of(batch))
    objective = custom.build_objective(torch.device("cpu"), torch.float32)
    total, _ = objective(TOKENS, LABELS)
    shifted = copy.deepcopy(objective)
    shifted.labels_shifted = True
    again, _ = shifted(TOKENS, torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100))
    assert float(again) == pytest.approx(float(total), rel=1e-6)


@pytest.mark.parametrize("labels", [torch.tensor([0, 2, 1]), torch.tensor([0.5, 1.0, -2.0])], ids=["class", "number"])
def test_image_classifier_of_transformers_returns_the_sum(labels):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=4, patch_size=2, num_channels=1, num_labels=1 if labels.is_floating_point() else 3, **SMALL
    )
    model = transformers.ViTForImageClassification(config).eval()
    batch = {"pixel_values": torch.randn(3, 1, 4, 4), "labels": labels}
    structure = BatchStructure.of(batch)
    total, _ = Objective(model, None, structure)(*structure.flatten(batch))
    logits = model(pixel_values=batch["pixel_values"]).logits
    if labels.is_floating_point():
        expected = mse_loss(logits.squeeze(), labels, reduction="sum")
    else:
        expected = cross_entropy(logits, labels, reduction="sum")
    assert float(total) == pytest.approx(float(expected), rel=1e-6)


def test_auxiliary_loss_of_routers_is_weighted_by_the_targets():
    class Routed(nn.Module):
        router_aux_loss_coef = 0.5
        loss_function = staticmethod(cross_entropy)

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x, labels=None, **kwargs):
            loss = self.loss_function(self.head(x), labels, reduction="sum") / kwargs["num_items_in_batch"]
            return SimpleNamespace(loss=loss + 0.5 * 3.0, aux_loss=torch.tensor(3.0))

    model, batch = Routed(), {"x": torch.randn(4, 2), "labels": torch.tensor([0, 1, 2, -100])}
    structure = BatchStructure.of(batch)
    total, _ = Objective(model, None, structure)(*structure.flatten(batch))
    expected = cross_entropy(model.head(batch["x"]), batch["labels"], reduction="sum") + 3 * 0.5 * 3.0
    assert float(total) == pytest.approx(float(expected))


def test_model_without_a_loss_needs_labels_and_an_output_with_a_loss():
    with pytest.raises(ConfigError, match="no entry named labels"):
        Objective(nn.Linear(2, 3), None)
    structure = BatchStructure.of({"input": 0, "labels": 1})
    with pytest.raises(ConfigError, match="the model returned a Tensor without a loss"):
        Objective(nn.Linear(2, 3), None, structure)(torch.ones(1, 2), torch.ones(1))
