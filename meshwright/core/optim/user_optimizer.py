"""An optimizer of the user's as an update rule: any elementwise torch.optim.Optimizer that a factory makes.

torch's optimizers create their state in the first step in which a parameter has a gradient. So a checkpoint has, for
every parameter, the state that the check before the run found, and whether it exists yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import NUMBER, SCALAR, custom_state_kinds
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.parallel.local_shard import LocalShard, local_shard
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Parameter groups, as torch.optim takes them -> an optimizer of these parameters."""
EXISTS = "has_state"
"""The key that says whether a parameter has its state yet."""


class UserRule(UpdateRule):
    """Updates by the user's optimizer."""

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        factory: OptimizerFactory,
    ) -> None:
        super().__init__(parameters, config, layout, world)
        self.kinds = custom_state_kinds(config)
        by_settings: dict[tuple[float, float | None], list[Tensor]] = {}
        for parameter in sorted(parameters, key=lambda p: p.local.ndim < 2):
            key = (parameter.settings.lr_factor, decided_weight_decay(parameter))
            by_settings.setdefault(key, []).append(parameter.local)
        groups: list[dict[str, Any]] = [
            {"params": members, "lr": config.lr * lr_factor} | ({} if decay is None else {"weight_decay": decay})
            for (lr_factor, decay), members in by_settings.items()
        ]
        self.optimizer = make_optimizer(factory, groups, config.lr)
        self.state = self.optimizer.state
        factors = {p.local: p.settings.lr_factor for p in parameters}
        self.lr_factors = [factors[group["params"][0]] for group in self.optimizer.param_groups]
        self.loaded: dict[Tensor, dict[str, Tensor]] = {}
        """state that a checkpoint is loaded into, before the optimizer has any"""

    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        if not self.is_finite(finite):
            return
        self.divide_gradients(divisor)
        for group, lr_factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = lr * lr_factor
        self.optimizer.step()

    def state_shards(self, parameter: OptimizedParameter) -> dict[str, LocalShard]:
        local, shard = parameter.local, parameter.shard
        state = self.state.get(local)
        if not state:
            if local not in self.loaded:
                self.loaded[local] = empty_state(local, self.kinds)
            tensors = self.loaded[local]
        else:
            tensors = export_state(state, self.kinds)
        return {
            key: shard.with_local(value) if self.kinds.get(key) == "" else local_shard(value)
            for key, value in tensors.items()
        }

    def after_restore(self, restored: bool) -> None:
        """Gives the optimizer the state that a checkpoint was loaded into."""
        for group in self.optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for local in group["params"]:
                if restored and local in self.loaded and bool(self.loaded[local][EXISTS]):
                    self.state[local] = import_state(self.loaded[local], self.kinds, local.device, on_device)
        self.loaded = {}


def decided_weight_decay(parameter: OptimizedParameter) -> float | None:
    """The weight decay that the factory does not decide: vectors have none, unless a group of the config says so. None
    where the factory decides it.
    """
    settings = parameter.settings
    return settings.weight_decay if settings.sets_weight_decay or parameter.local.ndim < 2 else None


def make_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Calls the factory. The optimizer has exactly the given parameters, and the learning rate of the run."""
    given = {p: group["lr"] for group in groups for p in group["params"]}
    optimizer = factory(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer factory returned a {type(optimizer).__name__}", "expected a torch.optim.Optimizer"
        )
    found = {p: group.get("lr") for group in optimizer.param_groups for p in group["params"]}
    if found.keys() != given.keys():
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} has {len(found)} parameters, and {len(given)} were given to its "
            "factory",
            "expected an optimizer of all parameters; try frozen groups for those that are not trained",
        )
    rates = {rate for parameter, rate in found.items() if rate != given[parameter]}
    own = optimizer.defaults.get("lr")
    if own not in (None, lr, default_lr(type(optimizer))):
        rates.add(own)
    if rates:
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} has lr = {rates.pop()}, and optimizer.lr of the run is {lr:g}",
            "try --optimizer.lr, a schedule, and lr_factor of groups, without lr in the factory",
        )
    return optimizer


def default_lr(kind: type[torch.optim.Optimizer]) -> Any:
    """The learning rate of an optimizer that is made without one: that of the first class that has such an argument. A
    class in front of it may pass its keywords on.
    """
    bases = (base for base in kind.__mro__ if issubclass(base, torch.optim.Optimizer))
    signatures = (inspect.signature(base).parameters for base in bases)
    return next((parameters["lr"].default for parameters in signatures if "lr" in parameters), None)


def empty_state(parameter: nn.Parameter, kinds: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of a parameter's state in a checkpoint, without values."""
    tensors = {
        key: torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        if kind == ""
        else torch.zeros((), dtype=torch.float64 if kind == NUMBER else torch.float32)
        for key, kind in kinds.items()
    }
    return {EXISTS: torch.zeros(()), **tensors}


def export_state(state: dict[str, Any], kinds: dict[str, str]) -> dict[str, Tensor]:
    """The state of a parameter as tensors of a checkpoint; tensors are not copied."""
    tensors = {
        key: torch.tensor(state[key], dtype=torch.float64) if kind == NUMBER else state[key].detach()
        for key, kind in kinds.items()
    }
    return {EXISTS: torch.ones(()), **tensors}


def import_state(
    tensors: dict[str, Tensor], kinds: dict[str, str], device: torch.device, step_on_device: bool
) -> dict[str, Any]:
    """The inverse of `export_state`. A number that is whole becomes an int, as that of steps is. Scalars are on the
    device of the parameter; as in torch, the scalar `step` is there for fused and capturable optimizers alone.
    """

    def value(key: str, kind: str) -> Any:
        if kind == SCALAR:
            return tensors[key].to(device) if step_on_device or key != "step" else tensors[key]
        if kind != NUMBER:
            return tensors[key]
        number = float(tensors[key])
        return int(number) if number.is_integer() else number

    return {key: value(key, kind) for key, kind in kinds.items()}


def describe_state(state: dict[Any, Any], parameter: Tensor) -> dict[str, str]:
    """Key -> kind of the state of a parameter: '' for a tensor like the parameter. Raises a ConfigError for others."""
    kinds = {}
    for key, value in state.items():
        like = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype
        if not isinstance(key, str) or not key.isidentifier() or key == EXISTS:
            raise ConfigError(f"the optimizer state has the key {key!r}", "expected keys that are names")
        if like and parameter.ndim:
            kinds[key] = ""
        elif isinstance(value, Tensor) and not value.ndim and value.dtype == torch.float32:
            kinds[key] = SCALAR
        elif isinstance(value, int | float):
            kinds[key] = NUMBER
        elif value is not None:
            found = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"the optimizer state {key} of a parameter of shape {list(parameter.shape)} is {found}",
                "expected tensors of the shape and dtype of the parameter, float32 scalars, or numbers",
            )
    return kinds
