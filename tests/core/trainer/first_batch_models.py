"""Small models and samples for the check of the first batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.core.data.source import IndexableSource, find_structure
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.first_batch.check import FirstBatch, check_first_batch


def check(model, loss, samples, collate=None, blocks="", config=None, **options) -> FirstBatch:
    source = IndexableSource(samples, collate=collate)
    spec = ParallelSpec(blocks=blocks)
    structure = find_structure(source, collate)
    return check_first_batch(CustomModel(model, loss, spec, structure, collate, **options), source, config=config)


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


class OwnLoss(nn.Module):
    """A model that computes a loss of a given reduction itself."""

    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = nn.Linear(4, 3), reduction

    def forward(self, x, labels):
        return SimpleNamespace(loss=cross_entropy(self.layer(x), labels, reduction=self.reduction))
