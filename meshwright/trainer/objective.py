"""A custom model and loss as one module with the step's signature: (inputs..., targets) -> (loss sum, count)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.loader import count_valid_targets
from meshwright.errors import ConfigError
from meshwright.parallel.local_shard import full_tensor

LossFunction = Callable[[Any, Tensor], Any]


class Objective(nn.Module):
    """Combines a model and a loss. `loss(model(*inputs), targets)` must return the *sum* over valid targets, not the
    mean: the step divides once, by the count over the global batch. Valid are all integer targets except -100, or all
    samples where targets are not integers; a loss may return (sum, count) to have its count compared with that rule.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has no parameter to train", "expected at least one parameter that requires a gradient"
            )
        self.checked = False
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.loss = loss if isinstance(loss, nn.Module) else _LossModule(loss)
        reduction = getattr(loss, "reduction", "sum")
        if reduction != "sum":
            raise ConfigError(
                f"the loss has reduction = {reduction!r}",
                "expected reduction='sum'; the step divides by the global count",
            )

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        # numpy's floats are float64 by default; inputs follow the dtype of the model's weights
        *inputs, targets = (t.to(self.dtype) if t.is_floating_point() else t for t in batch)
        result = self.loss(self.model(*inputs), targets)
        total, count = result if isinstance(result, tuple) else (result, None)
        if not self.checked:
            self.check(total, count, count_valid_targets(targets))
        return total, targets.new_tensor(0) if count is None else torch.as_tensor(count)

    def check(self, total: Any, count: Any, expected: int) -> None:
        """Checks the loss on the first batch only: reading the count every step would synchronize with the device."""
        self.checked = True
        if not isinstance(total, Tensor) or (torch.is_grad_enabled() and not total.requires_grad):
            what = "a tensor without a gradient graph" if isinstance(total, Tensor) else f"a {type(total).__name__}"
            raise ConfigError(
                f"the loss returned {what}", "expected the sum over valid targets: a scalar tensor with a gradient"
            )
        if total.ndim:
            raise ConfigError(
                f"the loss returned a tensor of shape {tuple(total.shape)}",
                "expected the sum over valid targets: a scalar",
            )
        if count is not None and int(count) != expected:
            raise ConfigError(
                f"the loss counted {int(count)} valid targets, but the batch has {expected}",
                "try to mask with the target -100, or return the sum alone",
            )


class _LossModule(nn.Module):
    """A loss function as a module."""

    def __init__(self, function: LossFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Any, targets: Tensor) -> Any:
        return self.function(outputs, targets)


@torch.no_grad()
def copy_trained_weights(trained: Objective, targets: list[nn.Module], write: bool) -> None:
    """Copies the trained weights into the custom modules. All ranks gather the shards; those with `write` copy them."""
    for module, target in zip((trained.model, trained.loss), targets, strict=False):
        state = module.state_dict()
        for name, value in target.state_dict().items():
            full = full_tensor(state[name])
            if write:
                value.copy_(full)
