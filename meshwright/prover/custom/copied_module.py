"""Whether a module trains what it registers: no parameter appears late, and a copy computes with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.core.trainer.custom_model import CustomModel, copy_module
from meshwright.core.trainer.first_batch.trained_tensors import has_hook, leaves_of
from meshwright.prover.custom.subject import plain_objective
from meshwright.prover.oracle.plain_model import BatchDivision, PlainModel, Samples, seed_all


def find_unregistered(model: PlainModel, samples: Samples, names: set[str]) -> str:
    """A tensor that receives a gradient and was no parameter before the first forward pass; '' if there is none."""
    for name, parameter in model.parameters().items():
        if name not in names:
            return (
                f"{name} of shape {tuple(parameter.shape)} is registered by the first forward pass, so it is left out "
                "of the optimizer; try to make it in __init__"
            )
    known = {id(parameter) for parameter in model.parameters().values()}
    with unchanged_parameters(model):
        leaves = list(leaves_of(loss_of(model, samples)))
    for leaf in leaves:
        if id(leaf) not in known:
            return (
                f"a tensor of shape {tuple(leaf.shape)} receives a gradient and is no registered parameter, so it is "
                "left out of the optimizer; try nn.Parameter, nn.ParameterList or nn.ModuleList"
            )
    return ""


def find_copy_problem(model: PlainModel, custom: CustomModel, samples: Samples) -> str:
    """How the gradients of a copy differ from those of the module: every rank trains a copy. '' if they do not."""
    loss = copy_module(custom.loss) if isinstance(custom.loss, nn.Module) else custom.loss
    copied = replace(custom, module=copy_module(custom.module), loss=loss)
    other = PlainModel(plain_objective(copied), BatchDivision(), dtype=model.dtype)
    own, found = ({id(p): n for n, p in m.parameters().items()} for m in (model, other))
    with unchanged_parameters(other):
        leaves = list(leaves_of(loss_of(other, samples)))
    for leaf in leaves:
        if id(leaf) not in found:
            name = own.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}")
            return (
                f"a copy of the module still computes with {name} of the original, as through a closure: the weight is "
                "tied in the module and not in the copy that a rank trains; try to read it from self in forward"
            )
    expected, gradients = (gradients_of(m, samples) for m in (model, other))
    for name, gradient in expected.items():
        if not torch.allclose(gradient, gradients.get(name, torch.zeros_like(gradient)), rtol=1e-5):
            hook = (
                "a hook on the tensor, which a copy does not have" if has_hook(model.parameters()[name]) else "a copy"
            )
            return f"the gradient of {name} in a copy of the module is another one: {hook}; try a hook of the module"
    return ""


@contextmanager
def unchanged_parameters(model: PlainModel) -> Iterator[None]:
    """Restores the parameters that a forward pass changes, such as those of a momentum teacher."""
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters().values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)


def loss_of(model: PlainModel, samples: Samples) -> Tensor:
    seed_all(0)
    return model.loss_sum(samples)


def gradients_of(model: PlainModel, samples: Samples) -> dict[str, Tensor]:
    for parameter in model.parameters().values():
        parameter.grad = None
    with unchanged_parameters(model):
        loss_of(model, samples).backward()
    return {name: p.grad.clone() for name, p in model.parameters().items() if p.grad is not None}
