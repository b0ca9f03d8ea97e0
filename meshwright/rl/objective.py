"""The objective of the learner: GRPO and plain policy gradient as a sum over the tokens of completions.

GRPO (Shao et al. 2024, arXiv:2402.03300, equation 3; with the two sides of clipping of DAPO, arXiv:2503.14476):

    loss = sum over tokens of  weight * ( -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl * k3(reference, new) )
    r = exp(new - old),   k3(p, q) = exp(p - q) - (p - q) - 1   (an estimate of KL(q || p) on samples of q)

Policy gradient has -new * A in place of the clipped ratio. The step divides the sum by the number of valid tokens of
the global batch, as it does with every loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.config.rl import RLConfig
from meshwright.core.torch_private import is_fake
from meshwright.errors import ConfigError
from meshwright.rl.entropy import is_vocabulary_shard, token_entropy
from meshwright.rl.logprobs import token_logprobs
from meshwright.rl.rows import ADVANTAGE, COLUMNS, OLD_LOGPROB, REFERENCE_LOGPROB, WEIGHT

Measured = dict[str, tuple[Tensor, Tensor]]
"""What is measured beside the loss: name -> (sum over valid tokens, number of valid tokens)."""


def policy_loss(logprobs: Tensor, values: Tensor, labels: Tensor, config: RLConfig) -> tuple[Tensor, Measured]:
    """Returns the sum of the loss over the tokens whose label counts, and what is measured, all but the entropy.

    `logprobs` and `labels` have the shape (rows, tokens); `values` has four columns per token, see `rl/rows.py`.
    """
    valid = labels != IGNORE_INDEX
    # Where a label does not count, no value may enter the sum or its gradient, not even a NaN times zero.
    values = torch.where(valid[..., None], values.to(logprobs.dtype), 0.0)
    new = torch.where(valid, logprobs, 0.0)
    advantage, old, weight, reference = (values[..., c] for c in (ADVANTAGE, OLD_LOGPROB, WEIGHT, REFERENCE_LOGPROB))
    low, high = 1.0 - config.clip, 1.0 + (config.clip if config.clip_high is None else config.clip_high)
    log_ratio = new - old
    ratio = log_ratio.exp()
    if config.objective == "grpo":
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        losses = -new * advantage
    divergence = k3(reference - new)
    if config.kl:
        losses = losses + config.kl * divergence
    with torch.no_grad():
        clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
        per_token = {
            "ratio": ratio,
            "approx_kl": k3(log_ratio),
            "clip_share": clipped.to(ratio.dtype),
            "kl": divergence,
        }
        count = valid.sum()
        kept = [name for name in config.measured_names if name in per_token]
        measured = {name: (torch.where(valid, per_token[name], 0.0).sum(), count) for name in kept}
    return (weight * losses).sum(), measured


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimate of the KL divergence KL(q || p) on samples of q, with log_ratio = log p - log q: it is never
    negative, and its mean is exact.
    """
    return log_ratio.expm1() - log_ratio


def logits_loss(logits: Tensor, values: Tensor, labels: Tensor, config: RLConfig) -> tuple[Tensor, Measured]:
    """The policy loss of logits, which may be sharded over the vocabulary, and all that is measured."""
    if isinstance(logits, DTensor) and not is_vocabulary_shard(logits):
        logits = logits.full_tensor()
    total, measured = policy_loss(label_logprobs(logits, labels, config), values, labels, config)
    if not is_fake(total):  # a trace of shapes communicates nothing
        valid = labels != IGNORE_INDEX
        entropy = torch.where(valid, token_entropy(logits, config.temperature), 0.0)
        measured["entropy"] = entropy.sum(), valid.sum()
    return total, measured


def label_logprobs(logits: Tensor, labels: Tensor, config: RLConfig) -> Tensor:
    """The log-probabilities of the labels as a plain tensor, also of logits that are sharded over the vocabulary."""
    logprobs = token_logprobs(logits, labels, config.temperature)
    return logprobs.to_local() if isinstance(logprobs, DTensor) else logprobs


class PolicyLoss(nn.Module):
    """The objective as the loss of a user's model: of (outputs, batch), where the outputs are logits, or have them as
    `logits`, and the batch has `labels` and `values`. In eval mode it is the negative log-likelihood of the labels: the
    objective is near zero on the policy that generated the rollouts, so that no comparison can be relative to it.
    """

    exact_entries = ("values",)
    """entries of the batch that are not rounded to the dtype of the model's weights"""

    def __init__(self, config: RLConfig) -> None:
        super().__init__()
        self.config = config
        self.measured_names = config.measured_names
        self.measured: Measured = {}
        """of the last micro-batch"""

    def forward(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        logits = find_logits(outputs, labels)
        if not self.training:
            return -label_logprobs(logits, labels, self.config).sum()
        total, self.measured = logits_loss(logits, require_values(batch.get("values"), labels), labels, self.config)
        return total

    def take_measured(self) -> list[Any]:
        """The sums and counts of the last micro-batch, in the order of `measured_names`; zeros in eval mode."""
        measured, self.measured = self.measured, {}
        return [value for name in self.measured_names for value in measured.get(name, (0.0, 0.0))]


def find_logits(outputs: Any, labels: Tensor) -> Tensor:
    """The logits of a model's outputs: the tensor itself, or the entry or attribute `logits`."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
        found = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"rl.objective needs the logits of every token, and the model returned {found} for labels of shape "
            f"{tuple(labels.shape)}",
            "expected logits of shape (rows, tokens, vocabulary), or an output with .logits",
        )
    return logits


def require_values(values: Tensor | None, labels: Tensor) -> Tensor:
    """Raises a ConfigError for a batch that has no values per token, such as samples without rollouts."""
    if values is None or values.shape != (*labels.shape, COLUMNS):
        found = "none" if values is None else f"a tensor of shape {tuple(values.shape)}"
        raise ConfigError(
            f"rl.objective trains on rollouts, and a batch has {found} for the values of its tokens",
            f"expected (tokens, labels, values) with {COLUMNS} values per token",
        )
    return values
