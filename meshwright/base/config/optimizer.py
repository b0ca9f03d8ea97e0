"""The settings of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.base.config.constraints import (
    PLACEMENT,
    NonNegativeInt,
    PositiveFloat,
    Range,
    UnitFraction,
)
from meshwright.errors import ConfigError

STATE = re.compile(r"([A-Za-z_]\w*(:scalar|:number)?( [A-Za-z_]\w*(:scalar|:number)?){0,63})?")
"""The state of a custom optimizer: names, with the kind of those that are no tensors of the parameter's shape."""


@dataclass(frozen=True)
class ParameterGroupConfig:
    """Parameters with settings of their own. A parameter belongs to the first group whose pattern matches its name."""

    pattern: str = ""
    """names of parameters, such as `*.norm.*`; `*` matches any text, `?` one character, `[ab]` one of several"""
    lr_factor: Annotated[float, Range(minimum=0, maximum=1e6)] = 1.0
    """learning rate, as a multiple of that of the step"""
    weight_decay: Annotated[float, Range(minimum=0, maximum=1e6)] | None = None
    """weight decay of these parameters, vectors included; by default as without a group"""
    frozen: bool = False
    """whether they keep their initial values: they have no gradient and no optimizer state"""

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigError("optimizer.groups: a group has no pattern", 'expected pattern = "*.norm.*" or similar')
        if self.frozen and (self.lr_factor != 1.0 or self.weight_decay is not None):
            raise ConfigError(
                f"optimizer.groups: the group {self.pattern} is frozen, and has a learning rate or weight decay",
                "expected frozen = true alone",
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, with clipping by global norm."""

    kind: Literal["adamw", "muon", "sgd", "lion", "adafactor", "custom"] = "adamw"
    """update rule; docs/optimizers.md has the formula and the state of each. custom is an optimizer of your own, by
    --optimizer MODULE:NAME or `train(optimizer=...)`
    """
    lr: Annotated[float, Range(minimum=0, maximum=1e30)] = 3e-3
    """peak learning rate"""
    beta1: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.9
    """adamw: decay rate of the first moment; lion: share of the momentum in the update"""
    beta2: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.95
    """adamw: decay rate of the second moment; lion: decay rate of the momentum"""
    eps: PositiveFloat = 1e-8
    """adamw: epsilon in the denominator"""
    weight_decay: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.1
    """weight decay of matrices, not of norms and biases: decoupled, and for sgd added to the gradient as in torch"""
    momentum: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.95
    """muon, sgd: decay rate of the momentum; sgd with 0 keeps no state"""
    nesterov: bool = True
    """muon, sgd: Nesterov momentum"""
    newton_schulz_steps: Annotated[int, Range(minimum=1, maximum=20)] = 5
    """muon: iterations that orthogonalize the momentum"""
    update_scale: Literal["match-rms-adamw", "original"] = "match-rms-adamw"
    """muon: 0.2 sqrt(max(rows, columns)), for the learning rate of AdamW, or sqrt(max(1, rows / columns))"""
    clip: Annotated[float, Range(minimum=0, maximum=1e12)] = 1.0
    """maximum global norm of the gradient; 0 disables clipping"""
    implementation: Literal["fused", "foreach"] = "fused"
    """implementation of torch.optim.AdamW and torch.optim.SGD; lion is always foreach"""
    cpu_offload: Annotated[bool, PLACEMENT] = False
    """keep optimizer state in host memory and run the optimizer on the CPU"""
    groups: tuple[ParameterGroupConfig, ...] = ()
    """groups of parameters with settings of their own: pattern, lr_factor, weight_decay, frozen"""
    factory: str = ""
    """custom: the name of the function that makes the optimizer; `train` writes it to the run file of its run folder"""
    state: str = ""
    """custom: the state per parameter that the check before the run found; `train` writes it, too"""

    def __post_init__(self) -> None:
        if not STATE.fullmatch(self.state):
            raise ConfigError("optimizer.state is not a list of state tensors", "expected what train has written")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, a pure function of the step."""

    kind: Literal["cosine", "linear", "wsd", "constant", "custom"] = "cosine"
    """shape after the warm-up; wsd (warmup-stable-decay) is constant, then decays linearly. custom is a function of
    your own, without warm-up, by --schedule MODULE:NAME or `train(schedule=...)`
    """
    warmup: NonNegativeInt = 10
    """steps of linear warm-up"""
    floor: UnitFraction = 0.1
    """final learning rate, as a fraction of the peak"""
    decay: UnitFraction = 0.2
    """wsd: fraction of all steps that the final decay takes"""
    function: str = ""
    """custom: the name of the function; `train` writes it to the run file of its run folder"""
