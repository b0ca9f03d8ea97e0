"""A user's own model and loss as the step wants them: (inputs..., targets) -> (sum of losses, count)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.loader import count_valid_targets
from meshwright.errors import ConfigError

LossFunction = Callable[[Any, Tensor], Any]


class Objective(nn.Module):
    """`loss(model(*inputs), targets)` must give the *sum* over what counts, not the mean: the step divides once, by the
    count over the whole global batch. What counts is every integer target but -100, or every sample where targets are
    not integers; a loss may return (sum, count) to have its own count checked against that rule."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("the model has no parameter to train", "allowed: at least one that requires a gradient")
        self.checked = False
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.loss = loss if isinstance(loss, nn.Module) else _Function(loss)
        reduction = getattr(loss, "reduction", "sum")
        if reduction != "sum":
            raise ConfigError(
                f"loss has reduction = {reduction!r}", "allowed: reduction='sum'; the step divides by the global count"
            )

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        # numpy's floats are float64 unless somebody said otherwise; the model's weights decide
        *inputs, targets = (t.to(self.dtype) if t.is_floating_point() else t for t in batch)
        result = self.loss(self.model(*inputs), targets)
        total, count = result if isinstance(result, tuple) else (result, None)
        if not self.checked:
            self.check(total, count, count_valid_targets(targets))
        return total, targets.new_tensor(0) if count is None else torch.as_tensor(count)

    def check(self, total: Any, count: Any, expected: int) -> None:
        """Once, on the first batch: reading a count from the device every step would make the host wait."""
        self.checked = True
        if not isinstance(total, Tensor) or (torch.is_grad_enabled() and not total.requires_grad):
            what = "a tensor cut from its graph" if isinstance(total, Tensor) else f"a {type(total).__name__}"
            raise ConfigError(f"loss gave {what}", "allowed: the sum over what counts, a scalar tensor with a gradient")
        if total.ndim:
            raise ConfigError(
                f"loss gave a tensor of shape {tuple(total.shape)}", "allowed: the sum over what counts, a scalar"
            )
        if count is not None and int(count) != expected:
            raise ConfigError(
                f"loss counted {int(count)} where the batch has {expected} targets that count",
                "mask with the target -100, or return the sum alone",
            )


class _Function(nn.Module):
    def __init__(self, function: LossFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Any, targets: Tensor) -> Any:
        return self.function(outputs, targets)
