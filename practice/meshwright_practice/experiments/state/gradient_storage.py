"""Where gradients live between a backward pass and an update, and what clearing them means."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.world import World
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import RankTraining, small_config
from meshwright_practice.pictures import Bars

ONE = torch.ones((), dtype=torch.float64)


def lifecycle(knobs: Knobs) -> Observation:
    """Follows the gradients of a small decoder: backward, accumulation, update and clearing."""
    [values] = run_ranks(follow_gradients, 1, int(knobs["backward_passes"]))
    labels = ("after backward", "zero_grad()", "zero_grad(set_to_none=False)")
    parts: dict[str, tuple[float, ...]] = {
        "gradients": (values["bytes_after_backward"], values["bytes_none"], values["bytes_zero"])
    }
    note = "With None, the optimizer skips a parameter; with zeros, momentum and weight decay still move it."
    return Observation(values, Bars("gradient memory", "bytes of all parameters", labels, parts), (note,))


def follow_gradients(world: World, passes: int) -> dict[str, float]:
    training = RankTraining(world, small_config(1, "--batch.global=2"))
    [batch] = next(training.batches)
    parameters = list(training.model.parameters().values())

    def backward() -> Tensor:
        loss = training.model.forward_loss(*batch.tensors) / batch.valid_targets
        loss.backward()
        return loss

    loss = backward()
    once = [gradient.clone() for gradient in gradients(parameters)]
    values: dict[str, float] = {
        "parameters": len(parameters),
        "with_gradient": len(once),
        "same_shape": sum(p.grad is not None and p.grad.shape == p.shape for p in parameters),
        "loss_is_leaf": int(loss.is_leaf),
        "bytes_after_backward": gradient_bytes(parameters),
    }
    for _ in range(passes - 1):
        backward()
    expected = [passes * gradient for gradient in once]
    values["accumulation_error"] = largest_difference(gradients(parameters), expected)
    values["growth"] = float(gradients(parameters)[0].norm() / once[0].norm())
    del loss

    # The optimizer reads .grad and nothing else: gradients that are written by hand give the same update.
    write_gradients(parameters, once)
    apply_update(training.optimizer)
    updated = [p.detach().clone() for p in parameters]
    other = RankTraining(world, small_config(1, "--batch.global=2"))
    other.run()
    computed = [p.detach() for p in other.model.parameters().values()]
    values["update_difference_without_loss"] = largest_difference(updated, computed)

    values |= clearing(training.optimizer, parameters, once)
    return values


def clearing(optimizer: Optimizer, parameters: list[nn.Parameter], once: list[Tensor]) -> dict[str, float]:
    """What torch's and Meshwright's zero_grad leave, and what the next update then does."""
    torch_optimizer = torch.optim.AdamW(parameters)
    values: dict[str, float] = {}
    torch_optimizer.zero_grad()
    values["none_after_zero_grad"] = sum(p.grad is None for p in parameters)
    values["bytes_none"] = gradient_bytes(parameters)
    values["movement_with_none"] = movement(optimizer, parameters)
    write_gradients(parameters, once)
    torch_optimizer.zero_grad(set_to_none=False)
    values["zeros_after_zero_grad"] = sum(p.grad is not None and not p.grad.any() for p in parameters)
    values["bytes_zero"] = gradient_bytes(parameters)
    values["movement_with_zeros"] = movement(optimizer, parameters)
    optimizer.zero_grad()
    values["none_after_trainer"] = sum(p.grad is None for p in parameters)
    return values


def movement(optimizer: Optimizer, parameters: list[nn.Parameter]) -> float:
    """How far an update with the present gradients moves the parameters."""
    before = [p.detach().clone() for p in parameters]
    apply_update(optimizer)
    return largest_difference([p.detach() for p in parameters], before)


def apply_update(optimizer: Optimizer) -> None:
    """One update at a learning rate of 0.01, as the trainer's step makes it."""
    optimizer.update(0.01, optimizer.gradient_norm(), ONE, torch.tensor(True))


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def gradient_bytes(parameters: list[nn.Parameter]) -> float:
    """Bytes of the gradients, as a multiple of those of the parameters."""
    return sum(gradient.nbytes for gradient in gradients(parameters)) / sum(p.nbytes for p in parameters)


def write_gradients(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()


def largest_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
