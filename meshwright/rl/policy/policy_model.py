"""A user's model under the policy objective: the same module, with batches of rollouts and the loss on its logits."""

from __future__ import annotations

import inspect
from dataclasses import replace

from torch import nn

from meshwright.base.config.rl import RLConfig
from meshwright.core.data.batch_structure import BatchStructure, CountRule, Node
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.forward_arguments import accepts
from meshwright.rl.objective import PolicyLoss

TOKENS, LABELS, VALUES = range(3)
"""The entries of the flat tuple, the same as those of a built-in model."""


def policy_custom_model(custom: CustomModel, config: RLConfig) -> CustomModel:
    """Returns the model with the policy objective in place of its loss. Its forward gets the token ids alone; it
    returns logits, or an output that has them.
    """
    return replace(
        custom,
        loss=PolicyLoss(config),
        batch=policy_batch(tokens_argument(custom.module)),
        collate=None,
        reduction="sum",
        loss_names=(),
        returns_count=False,
        unit="tokens",
    )


def policy_batch(tokens: str = "input_ids") -> BatchStructure:
    """The structure of a batch of rollouts: a dict of token ids, labels and values. Values are targets, which a model
    with `**kwargs` does not get.
    """
    names = (tokens, "labels", "values")
    root = Node(dict, tuple((name, index) for index, name in enumerate(names)))
    return BatchStructure(root, names, (LABELS, VALUES), CountRule("valid", LABELS))


def tokens_argument(module: nn.Module) -> str:
    """The name of the argument of forward that takes the token ids: input_ids, or the first one."""
    if accepts(module, "input_ids"):
        return "input_ids"
    parameters = inspect.signature(module.forward).parameters.values()
    return next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "input_ids")
