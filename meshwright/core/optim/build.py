"""Builds the optimizer of a rank from the config: which update rule has which parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import update_axes
from meshwright.base.topology.optimizer_state import RULES as RULE_DECLARATIONS
from meshwright.base.topology.optimizer_state import parameter_settings
from meshwright.core.optim.adafactor import Adafactor
from meshwright.core.optim.adamw import AdamW
from meshwright.core.optim.interface import OptimizedParameter, Optimizer, UpdateRule, local_parameter
from meshwright.core.optim.lion import Lion
from meshwright.core.optim.master_adamw import MasterAdamW
from meshwright.core.optim.muon import Muon
from meshwright.core.optim.sgd import SGD
from meshwright.core.optim.user_optimizer import OptimizerFactory, UserRule
from meshwright.core.parallel.local_shard import local_shard, local_tensor
from meshwright.core.parallel.mesh import new_group
from meshwright.core.parallel.world import World

RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD, "lion": Lion, "adafactor": Adafactor}
"""Name of an update rule -> its class; `topology/optimizer_state.py` declares the state of each."""

NO_MASTERS: Mapping[nn.Parameter, Tensor] = {}


def build_optimizer(
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    layout: Layout | None = None,
    world: World | None = None,
    blocks: Sequence[str] = (),
    prefix: str = "",
    factory: OptimizerFactory | None = None,
    masters: Mapping[nn.Parameter, Tensor] = NO_MASTERS,
) -> Optimizer:
    """Returns the optimizer of the parameters that require a gradient. `blocks` are the patterns of the names of the
    model's blocks; the user knows the parameters by their names without `prefix`. Parameters with a master weight are
    its rounding: the master is updated and rounded again.
    """
    world = world or World()
    layout = layout or Layout(replicate=world.size)
    parameters = []
    for name, parameter in named.items():
        if parameter.requires_grad:
            master = masters.get(parameter)
            shard = local_shard(parameter if master is None else master)
            in_block = any(fnmatchcase(name, f"{pattern}.*") for pattern in blocks)
            settings = parameter_settings(config, name.removeprefix(prefix), shard.shape, in_block)
            local = local_parameter(parameter if master is None else master, shard, config.cpu_offload)
            weight = None if master is None else local_tensor(parameter)
            parameters.append(OptimizedParameter(name, parameter, shard, local, settings, weight))
    # A pipeline stage may have no parameter that requires a gradient.
    dtype = next((p.local.dtype for p in parameters), next(iter(named.values())).dtype)
    if factory is not None:
        rule = UserRule(parameters, config, layout, world, factory)
        return Optimizer(parameters, [rule], config.clip, layout, world, dtype)
    # All ranks create process groups together, those without a parameter of the rule, too.
    group = None if RULE_DECLARATIONS[config.kind].elementwise else new_group(layout, *update_axes())
    by_rule: dict[str, list[OptimizedParameter]] = {}
    for optimized in parameters:
        by_rule.setdefault(optimized.settings.rule, []).append(optimized)
    kinds = RULES | ({"adamw": MasterAdamW} if masters else {})
    rules = [kinds[name](members, config, layout, world, group) for name, members in sorted(by_rule.items())]
    return Optimizer(parameters, rules, config.clip, layout, world, dtype)
