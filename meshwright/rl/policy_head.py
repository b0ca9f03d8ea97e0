"""The head of a built-in model with the policy objective: (hidden, labels, values) -> (loss sum, number of tokens)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.base.config.rl import RLConfig
from meshwright.core.models.layers.decoder import LanguageModel
from meshwright.core.models.layers.loss import HeadLoss, valid_tokens
from meshwright.core.torch_private import is_fake
from meshwright.errors import ConfigError
from meshwright.rl.objective import Measured, label_logprobs, logits_loss, require_values


class PolicyMeasures:
    """What the policy objective measures in a step, as the step sums it over ranks: (sum, count) of every name. The
    model has it, so that every rank of a pipeline knows the names; the rank of the head adds to it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.measured_names = names
        self.measured: list[Tensor] = []
        """one vector: the sums and counts since the last `pop_measured`"""

    @property
    def measured_length(self) -> int:
        return 2 * len(self.measured_names)

    @torch.no_grad()
    def add(self, measured: Measured) -> None:
        """Adds what a micro-batch measures, without a collective."""
        vector = torch.stack([value.double() for name in self.measured_names for value in measured[name]])
        self.measured[:] = [vector if not self.measured else self.measured[0] + vector]

    def pop_measured(self, device: torch.device) -> Tensor:
        """Returns the sums and counts since the last call; zeros where this rank computed no loss."""
        if not self.measured:
            return torch.zeros(self.measured_length, dtype=torch.float64, device=device)
        return self.measured.pop()

    def measured_values(self, sums: Sequence[float], targets: int, where: str) -> dict[str, float]:  # noqa: ARG002
        """Returns sum / count of every name; NaN where nothing was counted."""
        pairs = zip(self.measured_names, sums[::2], sums[1::2], strict=True)
        return {name: total / count if count else math.nan for name, total, count in pairs}


class PolicyHead(HeadLoss):
    """The output projection and the policy objective. It has the parameters of the head that it replaces. In eval mode
    the loss is the negative log-likelihood of the labels, which needs no values.
    """

    fusable = False  # the ratio of a token needs its log-probability before the loss is summed

    def __init__(self, head: HeadLoss, config: RLConfig, measures: PolicyMeasures) -> None:
        nn.Module.__init__(self)
        self.weight, self.cap = head.weight, head.cap
        self.config, self.measures = config, measures
        self.train(head.training)

    def forward(self, hidden: Tensor, labels: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not self.training:
            return -self.logprobs(hidden, labels).sum(), valid_tokens(labels)
        values = require_values(values, labels)
        total, measured = logits_loss(self.logits(hidden), values, labels, self.config)
        if not is_fake(total):
            self.measures.add(measured)
        return total, valid_tokens(labels)

    def logprobs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The log-probability of every label, as the objective computes it; 0 where a label does not count."""
        return label_logprobs(self.logits(hidden), labels, self.config)


def use_policy_objective(model: nn.Module, config: RLConfig) -> None:
    """Replaces the head of a built-in model, with or without parallelism to follow, by one with the policy objective.
    Parameters, their names and tied weights stay as they are.
    """
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"rl.objective needs a language model, and {type(model).__name__} has no head that it knows",
            "expected a built-in model, or the loss PolicyLoss on the logits of another one",
        )
    measures = PolicyMeasures(config.measured_names)
    model.head = PolicyHead(model.head, config, measures)
    model.measures = measures
