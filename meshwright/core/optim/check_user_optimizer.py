"""Examines an optimizer of the user's before a run: its state, whether a checkpoint continues it, and whether it is
elementwise.

The optimizer runs a few steps on random values: on whole tensors, on their halves, and with its state saved and loaded
in between. Nothing about it is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import CUSTOM, parameter_settings
from meshwright.core.optim.interface import OptimizedParameter
from meshwright.core.optim.user_optimizer import OptimizerFactory, UserRule, describe_state
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError

STEPS = 5
SAVED_AFTER = 2
SHAPES = {"matrix": (6, 4), "vector": (8,), "experts": (2, 4, 6)}
TOLERANCE = 1e-10
"""Relative error of float64 within which the update of a half equals the half of the update."""

Part = Callable[[Tensor], Tensor]
"""Selects a part of a tensor."""


@dataclass(frozen=True)
class UserOptimizerFacts:
    """What the examination found."""

    state: str
    """the state per parameter, as `optimizer.state` records it"""
    not_elementwise: str = ""
    """a split whose update differs from the update of the whole tensor; empty: the optimizer is elementwise"""


def examine_optimizer(factory: OptimizerFactory, config: OptimizerConfig) -> UserOptimizerFacts:
    """Examines a factory's optimizer. Raises a ConfigError if a run cannot use it."""
    config = replace(config, kind=CUSTOM, state="", lr=config.lr or 1.0, groups=(), cpu_offload=False)
    whole = Trial(factory, config)
    whole.run(0, STEPS)
    kinds = whole.state_kinds()
    text = " ".join(key if not kind else f"{key}:{kind}" for key, kind in kinds.items())
    config = replace(config, state=text)
    require_resumable(factory, config, whole)
    return UserOptimizerFacts(text, find_split_difference(factory, config, whole))


class Trial:
    """Steps of the optimizer on a part of fixed random values."""

    def __init__(self, factory: OptimizerFactory, config: OptimizerConfig, part: Part = lambda tensor: tensor) -> None:
        self.part, self.lr = part, config.lr
        self.parameters = {name: nn.Parameter(part(values(name, -1)).clone()) for name in SHAPES}
        optimized = [
            OptimizedParameter(
                name, parameter, local_shard(parameter), parameter, parameter_settings(config, name, SHAPES[name], True)
            )
            for name, parameter in self.parameters.items()
        ]
        self.rule = UserRule(optimized, config, Layout(), World(), factory)

    def run(self, first: int, last: int) -> None:
        one = torch.ones((), dtype=torch.float64)
        for step in range(first, last):
            for name, parameter in self.parameters.items():
                parameter.grad = self.part(values(name, step)).clone()
            self.rule.step(self.lr / (step + 1), one, torch.tensor(True))

    def state_kinds(self) -> dict[str, str]:
        """Key -> kind of the state, the same for every parameter."""
        found = {name: describe_state(self.rule.state[p], p) for name, p in self.parameters.items()}
        first, *others = found.items()
        for name, kinds in others:
            if kinds != first[1]:
                raise ConfigError(
                    f"the optimizer state of a {first[0]} is ({', '.join(first[1])}), and that of a {name} is "
                    f"({', '.join(kinds)})",
                    "expected the same state for every parameter",
                )
        return first[1]

    def checkpoint(self) -> dict[str, Tensor]:
        """Parameters and state by name, as a checkpoint has them."""
        tensors = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for parameter in self.rule.parameters:
            for key, shard in self.rule.state_shards(parameter).items():
                tensors[f"{parameter.name}/{key}"] = shard.local
        return tensors

    def load(self, saved: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.checkpoint().items():
                tensor.copy_(saved[name])
        self.rule.after_restore(True)


def values(name: str, step: int) -> Tensor:
    """Random values of a parameter (step -1) or of its gradient, with a spread of sizes."""
    generator = torch.Generator().manual_seed(1000 * len(name) + step + 1)
    normal = torch.randn(2, *SHAPES[name], generator=generator, dtype=torch.float64)
    return normal[0] * torch.exp(normal[1])


def require_resumable(factory: OptimizerFactory, config: OptimizerConfig, whole: Trial) -> None:
    """Raises a ConfigError unless an optimizer that continues from a checkpoint takes the same steps."""
    before, after = Trial(factory, config), Trial(factory, config)
    before.run(0, SAVED_AFTER)
    after.load({name: tensor.clone() for name, tensor in before.checkpoint().items()})
    after.run(SAVED_AFTER, STEPS)
    if any(not torch.equal(after.parameters[name], p) for name, p in whole.parameters.items()):
        raise ConfigError(
            "the optimizer takes other steps after a checkpoint: it is random, or has state outside of optimizer.state",
            "expected all state in optimizer.state, as tensors of the parameter's shape, float32 scalars, or numbers",
        )


def find_split_difference(factory: OptimizerFactory, config: OptimizerConfig, whole: Trial) -> str:
    """A description of a split for which the update of the parts is not the parts of the update; '' if there is none.
    Each part has an optimizer of its own, as on the ranks of a sharded layout.
    """
    for dim in (0, -1):
        for index in (0, 1):

            def part(tensor: Tensor, dim: int = dim, index: int = index) -> Tensor:
                return tensor.chunk(2, dim)[index]

            trial = Trial(factory, config, part)
            trial.run(0, STEPS)
            for name, parameter in trial.parameters.items():
                expected, start = part(whole.parameters[name]), part(values(name, -1))
                error = (parameter - expected).abs().max()
                if error > TOLERANCE * (expected - start).abs().max():
                    shape, along = SHAPES[name], dim % len(SHAPES[name])
                    return f"half of a tensor of shape {shape}, split along dimension {along}, has another update"
    return ""
