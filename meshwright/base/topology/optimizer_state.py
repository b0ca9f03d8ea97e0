"""What each optimizer keeps, reads and sends for a parameter, and which update rule a parameter has. Torch-free.

The planner, the simulator and the host-memory check compute bytes and times from this table, so that none of them knows
an optimizer by its name; the rules are in `optim/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.parameter_groups import find_group
from meshwright.base.topology.parameter_shards import ParameterShard

OUTSIDE_BLOCKS = ("before", "after", "root")
"""FSDP units of the parameters that are in no block."""
Shape = tuple[int, ...]
CUSTOM: Final = "custom"
"""The kind of an optimizer of the user's."""
SCALAR, NUMBER = "scalar", "number"
"""Kinds of its state beside tensors of the parameter's shape: float32 scalars, and numbers of Python."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the optimizer state of a parameter."""

    key: str
    """its key in a checkpoint: `optimizer/PARAMETER/KEY`"""
    dims: tuple[int, ...]
    """the dimensions of the parameter that it has: all of them for a moment, none for a number"""
    float32: bool = False
    """whether it is float32; otherwise it has the dtype of the parameter"""

    def nbytes(self, shape: Shape, element_size: int) -> int:
        """Bytes for a local shard of the parameter of this shape."""
        return prod(shape[dim] for dim in self.dims) * (4 if self.float32 else element_size)


@dataclass(frozen=True)
class RuleDeclaration:
    """What an update rule keeps, reads and needs."""

    state: Callable[[OptimizerConfig, Shape], tuple[StateTensor, ...]]
    """the state of a parameter of this shape"""
    settings: tuple[str, ...] = ()
    """the settings of the optimizer that it reads, beside those that every rule reads"""
    whole_matrices: bool = False
    """whether the owner of a matrix gets it as a whole, by `optim/matrix_exchange.py`"""
    matmuls: Callable[[OptimizerConfig, int, int], tuple[tuple[int, int, int], ...]] = lambda _config, _short, _long: ()
    """the products of the owner for one matrix, by its shorter and its longer side, each as (rows, columns, inner)"""
    sums: Callable[[Shape], int] | None = None
    """the elements of a parameter of this shape that the ranks sum; None if they sum none"""
    otherwise: str = ""
    """the rule of parameters that are no matrices of blocks; '' if this one updates every parameter"""

    @property
    def elementwise(self) -> bool:
        """Whether every element is updated by its own gradient and state alone, without a collective."""
        return not self.whole_matrices and self.sums is None


def moments(shape: Shape, *keys: str) -> tuple[StateTensor, ...]:
    """State tensors that have the shape of the parameter."""
    return tuple(StateTensor(key, tuple(range(len(shape)))) for key in keys)


def adamw_state(_config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    return (StateTensor("step", (), float32=True), *moments(shape, "exp_avg", "exp_avg_sq"))


def muon_state(_config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    return moments(shape, "momentum")


def newton_schulz_matmuls(config: OptimizerConfig, short: int, long: int) -> tuple[tuple[int, int, int], ...]:
    products = (short, short, long), (short, short, short), (short, long, short)
    return products * config.newton_schulz_steps


def adafactor_state(_config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    """Second moments: of the rows and columns of matrices, of every element of vectors."""
    step, dims = StateTensor("step", (), float32=True), tuple(range(len(shape)))
    if len(shape) < 2:
        return (step, *moments(shape, "variance"))
    return (step, StateTensor("row_var", dims[:-1]), StateTensor("col_var", (*dims[:-2], dims[-1])))


def adafactor_sums(shape: Shape) -> int:
    """The elements of all sums of one parameter: its squares and those of its update, and for a matrix the squares of
    the rows and columns of its gradient, and the second moments of its rows.
    """
    totals = shape[0] if len(shape) == 3 else 1
    if len(shape) < 2:
        return 2 * totals
    stack = prod(shape[:-2])
    return 2 * totals + stack * (shape[-2] + shape[-1] + 1)


def sgd_state(config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    return moments(shape, "momentum_buffer") if config.momentum else ()


def lion_state(_config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    return moments(shape, "exp_avg")


def custom_state_kinds(config: OptimizerConfig) -> dict[str, str]:
    """Key -> kind of the state of the user's optimizer, as `optimizer.state` records it."""
    return dict(item.partition(":")[::2] for item in config.state.split())


def custom_state(config: OptimizerConfig, shape: Shape) -> tuple[StateTensor, ...]:
    """The tensors that the user's optimizer keeps; numbers of Python are none."""
    return tuple(
        StateTensor(key, (), float32=True) if kind == SCALAR else moments(shape, key)[0]
        for key, kind in custom_state_kinds(config).items()
        if kind != NUMBER
    )


RULES: dict[str, RuleDeclaration] = {
    "adamw": RuleDeclaration(adamw_state, ("beta1", "beta2", "eps", "implementation")),
    "muon": RuleDeclaration(
        muon_state,
        ("momentum", "nesterov", "newton_schulz_steps", "update_scale"),
        whole_matrices=True,
        matmuls=newton_schulz_matmuls,
        otherwise="adamw",
    ),
    "adafactor": RuleDeclaration(adafactor_state, sums=adafactor_sums),
    "sgd": RuleDeclaration(sgd_state, ("momentum", "nesterov", "implementation")),
    "lion": RuleDeclaration(lion_state, ("beta1", "beta2")),
}
"""Name of an update rule -> its declaration. Every `optimizer.kind` but `custom` is the name of a rule."""
CUSTOM_RULE = RuleDeclaration(custom_state)


@dataclass(frozen=True)
class ParameterSettings:
    """How the optimizer treats one parameter."""

    rule: str
    """the name of its update rule"""
    weight_decay: float
    lr_factor: float = 1.0
    """its learning rate as a multiple of that of the step"""
    sets_weight_decay: bool = False
    """whether a group of the config sets its weight decay"""


def parameter_settings(config: OptimizerConfig, name: str, shape: Shape, in_block: bool) -> ParameterSettings:
    """The settings of a parameter of the full model. Embedding and head are not in a block."""
    rule = update_rule(config, name, shape, in_block)
    decay = config.weight_decay if len(shape) >= 2 else 0.0
    group = find_group(config, name)
    if group is None:
        return ParameterSettings(rule, decay)
    if group.weight_decay is None:
        return ParameterSettings(rule, decay, group.lr_factor)
    return ParameterSettings(rule, group.weight_decay, group.lr_factor, sets_weight_decay=True)


def update_rule(config: OptimizerConfig, name: str, shape: Shape, in_block: bool) -> str:  # noqa: ARG001
    """The name of a parameter's update rule: that of the optimizer, unless it combines two rules. Three dimensions are
    a stack of matrices, such as those of experts.
    """
    is_matrix = in_block and len(shape) in (2, 3)
    return config.kind if is_matrix else rule_declaration(config.kind).otherwise or config.kind


def rule_declaration(rule: str) -> RuleDeclaration:
    return CUSTOM_RULE if rule == CUSTOM else RULES[rule]


def kinds_that_read() -> dict[str, tuple[str, ...]]:
    """Setting -> the kinds of optimizers that read it, for the settings that not every kind reads."""
    read = {kind: {*RULES[kind].settings, *rule_declaration(RULES[kind].otherwise or kind).settings} for kind in RULES}
    return {key: tuple(kind for kind in RULES if key in read[kind]) for key in sorted(set().union(*read.values()))}


def state_tensors(config: OptimizerConfig, rule: str, shape: Shape) -> tuple[StateTensor, ...]:
    """The optimizer state of a parameter with this update rule."""
    return rule_declaration(rule).state(config, shape)


def shard_state_bytes(
    config: OptimizerConfig, parameter: ParameterShard, sharded: bool, element_size: int, masters: bool = False
) -> int:
    """Bytes of the optimizer state of a parameter on one rank; `sharded` if FSDP2 wraps the model. An offloaded update
    has a copy of the parameter, too, and with `masters` its master weight is part of the state.
    """
    if parameter.is_tied_copy or not parameter.trainable:
        return 0
    shape = parameter.shard_shape if sharded else parameter.shape
    rule = update_rule(config, parameter.name, parameter.shape, parameter.unit not in OUTSIDE_BLOCKS)
    state = sum(tensor.nbytes(shape, element_size) for tensor in state_tensors(config, rule, parameter.shape))
    return state + (prod(shape) * element_size if config.cpu_offload or masters else 0)


def rank_state_bytes(
    config: OptimizerConfig,
    parameters: Iterable[ParameterShard],
    sharded: bool,
    element_size: int,
    masters: bool = False,
) -> int:
    """Bytes of the optimizer state of one rank, with `masters` those of master weights included."""
    return sum(shard_state_bytes(config, parameter, sharded, element_size, masters) for parameter in parameters)
