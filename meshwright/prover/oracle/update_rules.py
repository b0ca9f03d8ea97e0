"""The optimizers by their definitions: one update of one full parameter, and which settings a parameter has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from meshwright.base.config import OptimizerConfig, RunConfig

State = dict[str, Tensor]
"""The optimizer state of one parameter, by the key that a checkpoint has."""


@dataclass(frozen=True)
class Rates:
    """What an update of a parameter reads besides its gradient and its state."""

    lr: float
    """the learning rate of the step times the factor of the parameter's group"""
    decay: float
    """weight decay"""
    config: OptimizerConfig
    eps: float = torch.finfo(torch.float64).eps
    """the resolution of the dtype in which the run stores parameters"""
    shape: tuple[int, ...] = ()
    """the shape of the parameter, where only a shard of it is updated"""


Update = Callable[[Tensor, Tensor, State, Rates], tuple[Tensor, State]]
"""(parameter, gradient, state, rates) -> the parameter and the state after the update"""


def adamw(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    """arXiv:1711.05101, algorithm 2."""
    config, time = rates.config, float(state.get("step", torch.zeros(()))) + 1
    first = (config.beta1 * moment(state, "exp_avg", parameter)).add_(gradient, alpha=1 - config.beta1)
    second = (config.beta2 * moment(state, "exp_avg_sq", parameter)).addcmul_(
        gradient, gradient, value=1 - config.beta2
    )
    denominator = (second / (1 - config.beta2**time)).sqrt_().add_(config.eps)
    direction = (first / (1 - config.beta1**time)).div_(denominator).add_(parameter, alpha=rates.decay)
    return parameter.sub(direction, alpha=rates.lr), {
        "step": torch.tensor(time, dtype=torch.float32),
        "exp_avg": first,
        "exp_avg_sq": second,
    }


def sgd(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    """Momentum as the sum of all gradients, older ones with less weight; weight decay is part of the gradient."""
    config, direction = rates.config, gradient + rates.decay * parameter
    if not config.momentum:
        return parameter - rates.lr * direction, {}
    momentum = config.momentum * moment(state, "momentum_buffer", parameter) + direction
    direction = direction + config.momentum * momentum if config.nesterov else momentum
    return parameter - rates.lr * direction, {"momentum_buffer": momentum}


def lion(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    """arXiv:2302.06675, algorithm 2."""
    config, average = rates.config, moment(state, "exp_avg", parameter)
    sign = torch.sign(config.beta1 * average + (1 - config.beta1) * gradient)
    after = parameter - rates.lr * (sign + rates.decay * parameter)
    return after, {"exp_avg": config.beta2 * average + (1 - config.beta2) * gradient}


def muon(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    """Orthogonalized momentum; a parameter with three dimensions has one matrix per index of the first."""
    config, mu = rates.config, rates.config.momentum
    momentum = mu * moment(state, "momentum", parameter) + (1 - mu) * gradient
    direction = mu * momentum + (1 - mu) * gradient if config.nesterov else momentum
    matrices = (direction if direction.ndim == 3 else direction[None]).to(gradient.dtype)
    parts = [polar_factor(matrix, config.newton_schulz_steps) for matrix in matrices]
    factor = muon_factor(rates.shape or tuple(parameter.shape), config)
    update = factor * torch.stack(parts).view_as(parameter).to(momentum.dtype)
    return parameter - rates.lr * (update + rates.decay * parameter), {"momentum": momentum}


def muon_factor(shape: tuple[int, ...], config: OptimizerConfig) -> float:
    """arXiv:2502.16982 (match-rms-adamw), or that of the author of Muon."""
    rows, columns = shape[-2:]
    if config.update_scale == "match-rms-adamw":
        return 0.2 * math.sqrt(rows if rows > columns else columns)
    return math.sqrt(rows / columns) if rows > columns else 1.0


def polar_factor(matrix: Tensor, steps: int) -> Tensor:
    """Each iteration maps the singular values s of X to 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(steps):
        small = x.T @ x if x.shape[0] >= x.shape[1] else x @ x.T
        factor = 3.4445 * torch.eye(len(small), dtype=x.dtype) - 4.7750 * small + 2.0315 * small @ small
        x = x @ factor if x.shape[0] >= x.shape[1] else factor @ x
    return x


def adafactor(parameter: Tensor, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
    """arXiv:1804.04235, algorithms 4 and 5. Each matrix of a parameter with three dimensions is one by itself."""
    if parameter.ndim == 3:
        states = [
            {key: s if key == "step" else s[index] for key, s in state.items()} for index in range(len(parameter))
        ]
        parts = [adafactor(*part, rates) for part in zip(parameter, gradient, states, strict=True)]
        joined = {key: torch.stack([s[key] for _, s in parts]) for key in ("row_var", "col_var")}
        return torch.stack([after for after, _ in parts]), {"step": parts[0][1]["step"], **joined}
    time = float(state.get("step", torch.zeros(()))) + 1
    share, eps = time**-0.8, rates.eps
    square = gradient * gradient
    after = {"step": torch.tensor(time, dtype=torch.float32)}
    if parameter.ndim >= 2:
        for key, dim in (("row_var", -1), ("col_var", -2)):
            mean = square.mean(dim)
            after[key] = (1 - share) * state.get(key, torch.zeros_like(mean)) + share * mean
        rows, columns = after["row_var"], after["col_var"]
        second = rows.unsqueeze(-1) * columns.unsqueeze(-2)
        second = second / rows.mean(-1).clamp(min=eps)[..., None, None]
    else:
        second = after["variance"] = (1 - share) * moment(state, "variance", parameter) + share * square
    update = gradient / second.clamp(min=eps**2).sqrt()
    relative = max(1e-3, root_mean_square(parameter)) * min(rates.lr, 1 / math.sqrt(time))
    clipped = update / max(1.0, root_mean_square(update))
    return parameter * (1 - rates.lr * rates.decay) - relative * clipped, after


def root_mean_square(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))


def moment(state: State, key: str, parameter: Tensor) -> Tensor:
    """A state tensor with the shape of the parameter; zeros before the first update."""
    return state[key] if key in state else torch.zeros_like(parameter)


UPDATES: dict[str, Update] = {"adamw": adamw, "sgd": sgd, "lion": lion, "muon": muon, "adafactor": adafactor}
"""Name of an update rule -> its definition."""
MATRIX_RULES = {"muon": "adamw"}
"""Name of an update rule of the matrices of blocks -> the rule of all other parameters."""

DECODER_BLOCKS = ("decoder.blocks.*",)
"""The names of the blocks of the built-in decoder."""


@dataclass(frozen=True)
class Settings:
    """How one parameter is updated."""

    rule: str
    lr_factor: float = 1.0
    decay: float = 0.0


def decay_of(parameter: Tensor, config: OptimizerConfig) -> float:
    """The weight decay of a parameter without a group."""
    return config.weight_decay if parameter.ndim >= 2 else 0.0


@dataclass(frozen=True)
class ReferenceOptimizer:
    """The optimizer of a run by its definition."""

    config: OptimizerConfig
    blocks: tuple[str, ...] = DECODER_BLOCKS
    """the names of the blocks, with `*` for their numbers"""
    eps: float = torch.finfo(torch.float64).eps

    @classmethod
    def of_run(cls, config: RunConfig, blocks: tuple[str, ...] = DECODER_BLOCKS) -> ReferenceOptimizer:
        stored = torch.float64 if config.precision.compute == "fp64" else torch.float32
        return cls(config.optimizer, blocks, torch.finfo(stored).eps)

    def settings(self, name: str, parameter: Tensor) -> Settings:
        """Muon updates the matrices of blocks, and AdamW all other parameters; so do others of MATRIX_RULES. Weight
        decay applies to matrices, unless the group of a parameter, the first whose pattern matches its name, has its
        own.
        """
        decay, factor = decay_of(parameter, self.config), 1.0
        in_block = any(fnmatchcase(name, f"{block}.*") for block in self.blocks)
        rule: str = self.config.kind
        if not (in_block and parameter.ndim in (2, 3)):
            rule = MATRIX_RULES.get(rule, rule)
        for group in reversed(self.config.groups):
            if fnmatchcase(name, group.pattern):
                factor = group.lr_factor
                decay = decay_of(parameter, self.config) if group.weight_decay is None else group.weight_decay
        return Settings(rule, factor, decay)

    def is_frozen(self, name: str) -> bool:
        matching = [group.frozen for group in self.config.groups if fnmatchcase(name, group.pattern)]
        return bool(matching) and matching[0]

    def update(
        self,
        name: str,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        lr: float,
        settings: Settings | None = None,
        shape: tuple[int, ...] = (),
    ) -> tuple[Tensor, State]:
        """One update. `settings` are those of the parameter, unless others are given. With `shape`, that of the
        parameter, it is one of a shard as if it were the parameter.
        """
        settings = settings or self.settings(name, parameter)
        rates = Rates(lr * settings.lr_factor, settings.decay, self.config, self.eps, shape)
        return UPDATES[settings.rule](parameter, gradient, dict(state), rates)
