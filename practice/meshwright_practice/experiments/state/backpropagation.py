"""Backpropagation by hand against finite differences and autograd, in float64, and what a backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.parallel.world import World
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import RankTraining, small_config
from meshwright_practice.pictures import Bars, Curves

STEP = 1e-6
"""The step of central differences; in float64 their error is near 1e-10."""


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def numerical_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Central differences of a scalar function, one element after the other."""
    gradient = torch.zeros_like(at)
    for index in range(at.numel()):
        change = torch.zeros_like(at)
        change.view(-1)[index] = STEP
        gradient.view(-1)[index] = (function(at + change) - function(at - change)) / (2 * STEP)
    return gradient


def chain_rule(knobs: Knobs) -> Observation:
    """The gradient of the first matrix of three, by the chain rule in several conventions, against finite differences.

    Columns are samples: h1 = W1 x, h2 = W2 h1, h3 = W3 h2, with the loss half the squared distance of h3 from y.
    """
    sizes, batch = (int(knobs["width"]), 4, 3, 2), 2
    w1, w2, w3 = (random(rows, columns) for columns, rows in pairwise(sizes))
    x, y = random(sizes[0], batch), random(sizes[3], batch)

    def loss(first: Tensor, slope: bool = False, mean: bool = False) -> Tensor:
        h1 = torch.tanh(first @ x) if slope else first @ x
        square = (w3 @ w2 @ h1 - y).square()
        return square.mean() if mean else square.sum() / 2

    expected = numerical_gradient(loss, w1)
    delta = w3 @ w2 @ w1 @ x - y
    upstream = w2.T @ w3.T @ delta
    row_x, (row1, row2, row3) = x.T, (w1.T, w2.T, w3.T)
    row_delta = (row_x @ row1 @ row2 @ row3 - y.T) @ row3.T @ row2.T
    layers = [nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.float64) for w in (w1, w2, w3)]
    for layer, weight in zip(layers, (w1, w2, w3), strict=True):
        layer.weight.data.copy_(weight)
    ((nn.Sequential(*layers)(x.T) - y.T).square().sum() / 2).backward()
    assert layers[0].weight.grad is not None
    h1 = torch.tanh(w1 @ x)
    through_tanh = w2.T @ w3.T @ (w3 @ w2 @ h1 - y)
    with_tanh = numerical_gradient(lambda first: loss(first, slope=True), w1)
    values: dict[str, float] = {
        "column_error": relative_error(upstream @ x.T, expected),
        "row_error": relative_error((row_x.T @ row_delta).T, expected),
        "autograd_error": relative_error(layers[0].weight.grad, expected),
        "tanh_error": relative_error((through_tanh * (1 - h1.square())) @ x.T, with_tanh),
        "tanh_error_without_slope": relative_error(through_tanh @ x.T, with_tanh),
        "mean_loss_error": relative_error(upstream @ x.T, numerical_gradient(lambda w: loss(w, mean=True), w1)),
        "wrong_order_multiplies": int(multiplies(lambda: delta @ w3.T @ w2.T @ x.T)),
        "wrong_order_error": square_wrong_order(int(knobs["width"])),
        "decoder_error": run_ranks(decoder_gradient_error, 1)[0],
    }
    names = ("column_error", "row_error", "tanh_error", "tanh_error_without_slope", "wrong_order_error")
    labels = ("columns", "rows", "with tanh'", "tanh' left out", "wrong order, square matrices")
    parts: dict[str, tuple[float, ...]] = {"relative error": tuple(values[name] for name in names)}
    note = "With the shapes of this chain, the factors in the wrong order cannot be multiplied at all."
    return Observation(values, Bars("error of the gradient of W1", "relative", labels, parts), (note,))


def multiplies(product: Callable[[], Tensor]) -> bool:
    try:
        product()
    except RuntimeError:
        return False
    return True


def square_wrong_order(width: int) -> float:
    """The error of (h3 - y) W3' W2' x' where all matrices are square, so that the product exists."""
    w1, w2, w3, x, y = (random(width, width, seed=seed) for seed in range(5))
    delta = w3 @ w2 @ w1 @ x - y
    return relative_error(delta @ w3.T @ w2.T @ x.T, w2.T @ w3.T @ delta @ x.T)


def decoder_gradient_error(world: World) -> float:
    """The gradient that the trainer computes for a matrix of the first block, against a central difference along it."""
    training = RankTraining(world, small_config(1, "--batch.global=2"))
    [batch] = next(training.batches)
    weight = training.model.parameters()["decoder.blocks.0.attention.q.weight"]

    def loss() -> Tensor:
        return training.model.forward_loss(*batch.tensors) / batch.valid_targets

    loss().backward()
    assert weight.grad is not None
    direction = weight.grad / weight.grad.norm()
    slopes = []
    with torch.no_grad():
        for sign in (1, -1):
            weight.add_(direction, alpha=sign * STEP)
            slopes.append(sign * float(loss()))
            weight.add_(direction, alpha=-sign * STEP)
    return abs(sum(slopes) / (2 * STEP) - float(weight.grad.norm())) / float(weight.grad.norm())


def needs_weight(knobs: Knobs) -> Observation:
    """Which tensors the backward pass of a feed-forward needs: its weights, its inputs, or both."""
    width = int(knobs["width"])
    below, above = (random(width, width, seed=seed) for seed in (1, 2))
    x = random(8, width, seed=3)
    first, second = (w.clone().requires_grad_() for w in (below, above))
    hidden = x @ first.T
    output = hidden @ second.T
    output.backward(torch.ones_like(output))
    assert first.grad is not None
    assert second.grad is not None
    upstream = torch.ones_like(output)
    values: dict[str, float] = {
        "own_gradient_error": relative_error(upstream.T @ (x @ below.T), second.grad),
        "below_error_with_weight": relative_error((upstream @ above).T @ x, first.grad),
        "below_error_with_other_weight": relative_error((upstream @ random(width, width, seed=9)).T @ x, first.grad),
        "weights_saved": saved_weights(width, input_gradient=True),
        "weights_saved_without_input_gradient": saved_weights(width, input_gradient=False),
        "changed_weight_refused": int(refuses_changed_weight(width)),
    }
    labels = ("own gradient, no weight used", "layer below, with W", "layer below, with another W")
    names = ("own_gradient_error", "below_error_with_weight", "below_error_with_other_weight")
    parts: dict[str, tuple[float, ...]] = {"relative error": tuple(values[name] for name in names)}
    note = (
        "A feed-forward has three matrices; autograd saves a weight only where the input of the layer has a gradient."
    )
    return Observation(values, Bars("error of a gradient by hand", "relative", labels, parts), (note,))


def feed_forward(width: int) -> FeedForward:
    module = FeedForward(width, 2 * width).double()
    for parameter in module.parameters():
        parameter.data.copy_(random(*parameter.shape))
    return module


def saved_weights(width: int, input_gradient: bool) -> int:
    """How many of the three weights of a feed-forward autograd saves for the backward pass."""
    module = feed_forward(width)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(random(4, width).requires_grad_(input_gradient)).sum().backward()
    return len(weights & saved)


def refuses_changed_weight(width: int) -> bool:
    """Whether backward raises if a weight that it needs has changed since the forward pass."""
    module = feed_forward(width)
    loss = module(random(4, width).requires_grad_()).sum()
    with torch.no_grad():
        module.down.weight.mul_(2)
    try:
        loss.backward()
    except RuntimeError:
        return True
    return False


def depth(knobs: Knobs) -> Observation:
    """The norm of the error signal at the first of many layers, relative to that at the last: a product of Jacobians.
    Every weight is an orthogonal matrix times a gain, so that a linear layer multiplies the norm by the gain.
    """
    layers, width, gain = int(knobs["layers"]), 16, float(knobs["gain"])
    lines = {f"linear, gain {gain:g}": signal_norms(layers, width, gain, nonlinear=False)}
    lines["linear, gain 1"] = signal_norms(layers, width, 1.0, nonlinear=False)
    lines["tanh, gain 1"] = signal_norms(layers, width, 1.0, nonlinear=True)
    first = [norms[0] for norms in lines.values()]
    values = {
        "linear": first[0],
        "gain_to_the_depth": gain ** (layers - 1),
        "linear_gain_1": first[1],
        "tanh_gain_1": first[2],
    }
    numbers = tuple(float(number) for number in range(1, layers + 1))
    picture = Curves("norm of the error signal", "layer", "relative to the last layer", numbers, lines)
    return Observation(values, picture, ("The signal at a layer is the product of the Jacobians of all layers above.",))


def signal_norms(layers: int, width: int, gain: float, nonlinear: bool) -> tuple[float, ...]:
    """The norm of the gradient of every layer's output, relative to the last."""
    outputs, x = [], random(1, width)
    for layer in range(layers):
        weight, _ = torch.linalg.qr(random(width, width, seed=layer))
        x = x @ weight.T * gain
        x = (torch.tanh(x) if nonlinear else x).requires_grad_()
        x.retain_grad()
        outputs.append(x)
    x.backward(random(1, width, seed=layers))
    norms = [float(output.grad.norm()) for output in outputs if output.grad is not None]
    return tuple(norm / norms[-1] for norm in norms)
