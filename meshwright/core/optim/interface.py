"""What every optimizer shares: local shards, gradient norm and clipping, unscaling, the finite gate, offload and state.

The optimizer of a rank is one or more update rules, each for some of the parameters. A rule (`adamw.py`, ...) updates
the local shards that it is given; its state is named by parameter and key, so that a checkpoint loads on any layout.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import OPTIMIZER_AXIS
from meshwright.base.topology.optimizer_state import ParameterSettings
from meshwright.core.kernels.gradient_norm import square_sum
from meshwright.core.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import foreach_copy_, foreach_mul_, foreach_zero_


@dataclass(frozen=True, eq=False)
class OptimizedParameter:
    """A parameter on this rank that the optimizer updates."""

    name: str
    parameter: nn.Parameter
    """the parameter of the model; a DTensor where it is sharded"""
    shard: LocalShard
    """the shard of the parameter on this rank, or of its master weight, without a copy"""
    local: nn.Parameter
    """what a rule updates: the parameter, the local shard of a DTensor or a master weight, or a copy in CPU memory"""
    settings: ParameterSettings
    weight: Tensor | None = None
    """the local shard of the parameter, where it is the rounding of a master weight"""


class UpdateRule(ABC):
    """How some of the parameters are updated. A subclass allocates the whole `state` when it is made, because a
    checkpoint is loaded into it before the first step.
    """

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters, self.config, self.layout, self.world = parameters, config, layout, world
        self.state: dict[Tensor, dict[str, Tensor]] = {p.local: {} for p in parameters}
        """local parameter -> its state by key, as `topology/optimizer_state.py` declares it"""
        self.is_finite: Callable[[Tensor], bool] = bool
        """reads `finite` on the host, for rules that need it there; the simulator's tensors have no values to read"""
        self.group = group
        """the process group of its collectives: the ranks that update the same parameters; None if it is one rank, or
        the optimizer has no collectives
        """

    @abstractmethod
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        """Divides the gradients of the local parameters by `divisor` and updates the parameters once, at the learning
        rate of the step times the factor of each parameter. If not `finite`, nothing changes. Every rank calls it in
        every step, with the same values, so that a rule may use collectives.
        """

    rounds_masters = False
    """whether `step` writes the weights of master weights, and reads gradients in any dtype; otherwise the optimizer
    does so
    """

    def state_shards(self, parameter: OptimizedParameter) -> dict[str, LocalShard]:
        """The state of a parameter by key, as shards of the full state: numbers, and tensors that are sharded like the
        parameter.
        """
        shard = parameter.shard
        return {
            key: shard.with_local(value) if value.ndim or not shard.shape else local_shard(value)
            for key, value in self.state[parameter.local].items()
        }

    def after_restore(self, restored: bool) -> None:
        """Called once, before the first step: after a checkpoint was loaded into the state, or when there is none."""
        del restored  # a rule that allocates its state when it is made has nothing to do

    def divide_gradients(self, divisor: Tensor) -> None:
        """Divides the gradients of the local parameters in place."""
        if gradients := [p.local.grad for p in self.parameters if p.local.grad is not None]:
            foreach_mul_(gradients, 1.0 / divisor)

    def groups(self) -> dict[tuple[float, float], list[OptimizedParameter]]:
        """The parameters by (learning-rate factor, weight decay), matrices first."""
        found: dict[tuple[float, float], list[OptimizedParameter]] = {}
        for parameter in sorted(self.parameters, key=lambda p: p.local.ndim < 2):
            settings = parameter.settings
            found.setdefault((settings.lr_factor, settings.weight_decay), []).append(parameter)
        return found


class Optimizer:
    """The optimizer of one rank. `update` unscales, clips and steps in one pass over the gradients; a gradient that is
    not finite changes nothing.
    """

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        rules: Sequence[UpdateRule],
        clip: float,
        layout: Layout,
        world: World,
        dtype: torch.dtype,
    ) -> None:
        self.optimized, self.rules, self.dtype = parameters, rules, dtype
        self.clip, self.layout, self.world = clip, layout, world
        self.offload = any(rule.config.cpu_offload for rule in rules)
        self.names = [p.name for p in parameters]
        self.parameters = [p.parameter for p in parameters]
        self.shards = [p.shard for p in parameters]
        self.local_parameters = [p.local for p in parameters]
        self.lr = 0.0
        """the learning rate of the last update"""
        self.used_parameters = 0
        """a hash of which parameters had a gradient, which all ranks must agree on; 0 where all had one"""
        self.sharded = layout.pipeline > 1 or any(shard.sharded_axes for shard in self.shards)
        """whether any rank has elements that another rank does not have"""
        first_ranks = {
            axes: layout.replica_group(world.rank, axes)[0] for axes in {shard.sharded_axes for shard in self.shards}
        }
        self.counts_in_norm = [first_ranks[shard.sharded_axes] == world.rank for shard in self.shards]
        """per shard: whether this rank adds it to the gradient norm; one of the ranks with the same shard does"""

    def moments(self) -> dict[str, LocalShard]:
        """Returns the optimizer state by `parameter name/key`, in the order of the parameters."""
        rules = {p.name: rule for rule in self.rules for p in rule.parameters}
        return {
            f"{parameter.name}/{key}": shard
            for parameter in self.optimized
            for key, shard in rules[parameter.name].state_shards(parameter).items()
        }

    def group_names(self) -> dict[str, str]:
        """Process group name -> axis, for the collectives of the rules."""
        return {rule.group.group_name: OPTIMIZER_AXIS for rule in self.rules if rule.group is not None}

    def state_tensors(self) -> list[Tensor]:
        """Returns the tensors of the optimizer state that are in memory."""
        values = [value for rule in self.rules for state in rule.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def after_restore(self, restored: bool) -> None:
        """Called before the first step, with whether a checkpoint was loaded."""
        for rule in self.rules:
            rule.after_restore(restored)
        if restored:
            self.refresh_offloaded()

    def refresh_offloaded(self) -> None:
        """Copies the parameters to CPU memory again after a checkpoint has changed them."""
        if self.offload:
            with torch.no_grad():
                for local, shard in zip(self.local_parameters, self.shards, strict=True):
                    local.copy_(shard.local)

    def gradients(self) -> list[tuple[Tensor, bool]]:
        """Returns the local gradient shards, and for each whether this rank adds it to the norm."""
        pairs = zip(self.parameters, self.counts_in_norm, strict=True)
        return [(local_tensor(p.grad), counts) for p, counts in pairs if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Returns the norm over all parameters, each counted once. Gradients are already summed over ranks."""
        gradients = self.gradients()
        has_gradient = bytes(p.grad is not None for p in self.parameters)
        # The hash is 0 where every parameter has a gradient, because pipeline stages differ in their parameters.
        self.used_parameters = 0 if all(has_gradient) else zlib.crc32(has_gradient)
        counted = [gradient for gradient, counts in gradients if counts or not self.sharded]
        square = square_sum(counted, self.dtype).to(self.world.device)
        if self.sharded:
            square = self.world.all_reduce(square, "gradient norm").wait()
        return square.sqrt().to(self.dtype)

    def update(self, lr: float, norm: Tensor, scale: Tensor, finite: Tensor) -> None:
        """Updates the parameters once. `norm` is that of the unscaled gradient; the stored one is `scale` times it."""
        self.lr = lr
        self._attach_gradients()
        divisor = scale * torch.clamp(norm / self.clip, min=1.0) if self.clip else scale * torch.ones_like(norm)
        if self.offload:
            divisor, finite = divisor.cpu(), finite.cpu()  # the host waits for the gradients, too
        for rule in self.rules:
            rule.step(lr, divisor, finite)
        if self.offload:
            with torch.no_grad():
                for local, shard in zip(self.local_parameters, self.shards, strict=True):
                    shard.local.copy_(local, non_blocking=True)
        rounded = [p for rule in self.rules if not rule.rounds_masters for p in rule.parameters]
        if weights := [p.weight for p in rounded if p.weight is not None]:
            foreach_copy_(weights, [p.shard.local for p in rounded if p.weight is not None])

    def _attach_gradients(self) -> None:
        """Gives each local parameter the local shard of its parameter's gradient, in CPU memory if offloaded."""
        for rule in self.rules:
            for p in rule.parameters:
                if p.parameter is not p.local and p.parameter.grad is not None:
                    gradient = local_tensor(p.parameter.grad)
                    gradient = gradient.to("cpu", non_blocking=True) if self.offload else gradient
                    p.local.grad = gradient if rule.rounds_masters else gradient.to(p.local.dtype)

    def zero_grad(self, in_place: bool = False) -> None:
        """Frees the gradients, or fills them with zeros in place."""
        if in_place:
            foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        for parameter in (*self.local_parameters, *self.parameters):
            parameter.grad = None


def local_parameter(parameter: Tensor, shard: LocalShard, offload: bool) -> nn.Parameter:
    """What a rule updates in place of a parameter or of its master weight."""
    if offload:
        host = torch.empty(shard.local.shape, dtype=shard.local.dtype, pin_memory=shard.local.is_cuda)
        return nn.Parameter(host.copy_(shard.local))
    if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor):
        return parameter
    local = nn.Parameter(shard.local)
    local.grad_dtype = None  # the gradient of a master weight may be in the dtype of the weight
    return local
