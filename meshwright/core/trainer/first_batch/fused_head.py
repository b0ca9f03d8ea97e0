"""Lets the head of a causal language model of transformers compute the loss, so that its logits never exist.

The head computes the loss from its input (see kernels/cross_entropy.py) and returns it in place of the logits, and the
model's loss function returns what it gets. This is right only if the model does nothing else with its logits, which a
pass over the first sample verifies; until then, and if it fails, the model computes as it did.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.kernels.cross_entropy import linear_cross_entropy
from meshwright.errors import ConfigError

SUM_ARGUMENT = "num_items_in_batch"
"""The argument by which models of transformers are told what to divide their summed loss by."""
SAMPLE = 128
"""Tokens whose loss is compared with that of the logits."""
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-5, 1e-2
"""Largest relative difference of the two: models compute the loss in float32, and two kernels may round logits of 8 or
11 bits differently."""


class FusedHead:
    """The head and the loss function of a model, and whether they are fused."""

    def __init__(self, model: Any) -> None:
        self.head: nn.Linear = model.get_output_embeddings()
        self.project_to_logits, self.loss_of_logits = self.head.forward, model.loss_function
        self.enabled = False
        self.verifying = False
        self.problem = "the model does not call its head"
        """why the loss cannot be fused; empty if it can"""
        self.labels: Tensor | None = None
        """the shifted labels of the next forward pass; None: the head computes logits"""
        self.loss: Tensor | None = None
        """what the head returned in place of logits"""
        self.labels_of_loss: Tensor | None = None
        self.head.forward = self.forward
        model.loss_function = self.loss_function

    def take_labels(self, labels: Tensor, *, shifted: bool) -> None:
        """Gets the labels of a batch before the model is called."""
        if self.enabled or self.verifying:
            self.labels = labels if shifted else shift(labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the loss with as many dimensions as logits have; the logits if the labels are not theirs."""
        labels, self.labels, self.loss = self.labels, None, None
        if labels is None or labels.shape != hidden.shape[:-1]:
            return self.project_to_logits(hidden)  # type: ignore[no-any-return]
        if self.verifying:
            self.compare(hidden[:1, :SAMPLE], labels[:1, :SAMPLE])
        self.loss = linear_cross_entropy(hidden, self.head.weight, labels, IGNORE_INDEX).view(1, 1, 1)
        self.labels_of_loss = labels
        return self.loss

    def compare(self, hidden: Tensor, labels: Tensor) -> None:
        """Compares the loss of a few tokens with that of their logits."""
        logits = self.project_to_logits(hidden)
        arguments = {"vocab_size": len(self.head.weight), SUM_ARGUMENT: 1, "shift_labels": labels}
        expected = float(self.loss_of_logits(logits=logits, labels=None, **arguments))
        found = float(linear_cross_entropy(hidden, self.head.weight, labels, IGNORE_INDEX))
        tolerance = HALF_PRECISION_TOLERANCE if logits.dtype.itemsize == 2 else TOLERANCE
        equal = abs(found - expected) <= tolerance * abs(expected)
        self.problem = "" if equal else f"the fused loss is {found:.6g}, and that of the logits {expected:.6g}"

    def loss_function(self, logits: Any = None, labels: Any = None, vocab_size: Any = None, **others: Any) -> Any:
        """Returns the loss that the head computed, where the logits are what it returned: the sum, or the mean if the
        model asks for no sum.
        """
        loss, self.loss = self.loss, None
        if loss is None:
            return self.loss_of_logits(logits=logits, labels=labels, vocab_size=vocab_size, **others)
        counted, divisor = self.labels_of_loss, others.get(SUM_ARGUMENT)
        assert counted is not None
        if logits is not loss or vocab_size != len(self.head.weight) or divisor not in (1, None):
            self.problem = "the model changes its logits before the loss"
            if self.enabled:
                raise ConfigError(
                    f"{self.problem}, and did not on the first sample", "try kernels.loss = torch, which keeps logits"
                )
        if self.verifying:
            shifted = others.get("shift_labels")
            if not torch.equal(shift(labels) if shifted is None else shifted, counted):
                self.problem = "the model changes its labels before the loss"
        return loss.view(()) if divisor == 1 else loss.view(()) / (counted != IGNORE_INDEX).sum()


def shift(labels: Tensor) -> Tensor:
    """The labels of the next tokens."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def has_plain_head(model: Any) -> bool:
    """Whether the head of a model of transformers is a linear layer without bias, and nothing else."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return type(head) is nn.Linear and head.bias is None
