"""A linear projection with low-rank factors: W x + alpha / rank B A x, without the matrix W + B A."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.base.models.lora import FACTORS
from meshwright.base.models.spec import ModelSpec
from meshwright.errors import ConfigError


class LoraLinear(nn.Linear):
    """An nn.Linear with the factors `lora_a` (rank, in) and `lora_b` (out, rank). Tensor parallelism replaces
    `low_rank`.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self._parameters.update(base._parameters)
        empty = base.weight.new_empty
        self.register_parameter("lora_a", nn.Parameter(empty((rank, base.in_features))))
        self.register_parameter("lora_b", nn.Parameter(empty((base.out_features, rank))))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.low_rank(x)

    def low_rank(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.lora_a) * self.scale, self.lora_b)


def add_factors(model: nn.Module, spec: ModelSpec, scale: float) -> None:
    """Gives the projections that have factors in the spec their factors, and freezes what the spec does not train."""
    for parameter in spec.parameters:
        module, _, factor = parameter.name.rpartition(".")
        if factor == FACTORS[0]:
            parent, _, name = module.rpartition(".")
            base = model.get_submodule(module)
            if type(base) is not nn.Linear:
                raise ConfigError(
                    f"lora.targets matches {module}, which is a {type(base).__name__}",
                    "expected projections that are linear layers",
                )
            setattr(model.get_submodule(parent), name, LoraLinear(base, parameter.shape[0], scale))
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(spec.by_name[name].trainable)
