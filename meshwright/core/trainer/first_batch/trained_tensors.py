"""Whether the copy of a model that a rank trains contains all that the user's model trains: parameters and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.core.trainer.objective import BatchLoss
from meshwright.errors import ConfigError


def check_hooks(modules: list[nn.Module]) -> None:
    """Raises ConfigError if a parameter has a hook: every rank trains a copy of the modules, which has none."""
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        if has_hook(parameter):
            raise ConfigError(
                f"{name} has a hook on the tensor, and every rank trains a copy of the model, which does not have it",
                "try a hook of the module, such as register_full_backward_hook, or change the gradient in the loss",
            )


def check_leaves(loss: BatchLoss, trained: nn.Module, given: list[nn.Module]) -> list[str]:
    """Raises ConfigError if the loss is computed with a parameter that the trained copy does not register; returns
    notes about other tensors that receive a gradient. `given`: the modules that were copied.
    """
    known = {id(tensor) for tensor in (*trained.parameters(), *loss.flat)}
    originals = {id(p): name for module in given for name, p in module.named_parameters()}
    notes = []
    for leaf in leaves_of(loss.total):
        if id(leaf) in known:
            continue
        if id(leaf) in originals:
            raise ConfigError(
                f"a copy of the model still computes with {originals[id(leaf)]} of the original, as through a closure, "
                "and every rank trains a copy",
                "try to read the parameter from self in forward",
            )
        if isinstance(leaf, nn.Parameter):
            raise ConfigError(
                f"a parameter of shape {tuple(leaf.shape)} receives a gradient and is not registered, as in a list of "
                "layers, so it is never updated",
                "try nn.ModuleList or nn.ParameterList, or requires_grad_(False)",
            )
        notes.append(
            f"a tensor of shape {tuple(leaf.shape)} receives a gradient and is no parameter, so it is never updated"
        )
    return notes


def check_registered(trained: nn.Module, names: set[str]) -> None:
    """Raises ConfigError if the first forward pass has registered a parameter; `names` are those from before."""
    for name, parameter in trained.named_parameters():
        if name not in names:
            raise ConfigError(
                f"{name} of shape {tuple(parameter.shape)} is registered by the first forward pass, so it is never "
                "updated",
                "try to make the parameter in __init__",
            )


def has_hook(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of the gradient graph of a loss."""
    pending: list[Any] = [loss.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions]
