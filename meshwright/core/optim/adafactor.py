"""Adafactor: second moments of matrices as a product of row and column means (arXiv:1804.04235), as in torch.

Ranks sum the squares of their shards by two all-reduces per step: those of rows, columns and parameters, then those of
the updates, which are clipped by their root mean square. Full matrices are never gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.optim.interface import OptimizedParameter, UpdateRule
from meshwright.core.optim.matrix_exchange import sharding_of_tensor
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.world import World

BETA2_DECAY = -0.8
"""The second moments of step t have the weight 1 - t^BETA2_DECAY."""
MIN_RMS = 1e-3
"""The smallest root mean square of a parameter that multiplies the learning rate."""
MAX_UPDATE_RMS = 1.0
"""The root mean square to which an update is clipped."""


class Adafactor(UpdateRule):
    """Keeps the second moments of rows and columns of matrices, and of every element of vectors. In a parameter with
    three dimensions, each matrix along the first one (that of an expert) is scaled and clipped by itself.
    """

    def __init__(
        self,
        parameters: Sequence[OptimizedParameter],
        config: OptimizerConfig,
        layout: Layout,
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, config, layout, world, group)
        for parameter in parameters:
            local = parameter.local
            step = torch.zeros((), device=local.device)
            if local.ndim >= 2:
                rows, columns = local.new_zeros(local.shape[:-1]), local.new_zeros((*local.shape[:-2], local.shape[-1]))
                self.state[local] = {"step": step, "row_var": rows, "col_var": columns}
            else:
                self.state[local] = {"step": step, "variance": torch.zeros_like(local)}
        self.sharded = any(p.shard.sharded_axes for p in parameters)
        """whether any rank has elements that another rank does not have"""

    def state_shards(self, parameter: OptimizedParameter) -> dict[str, LocalShard]:
        shards = super().state_shards(parameter)
        if parameter.local.ndim >= 2:
            for key, dims in zip(("row_var", "col_var"), row_and_column_dims(parameter), strict=True):
                shards[key] = shard_of_dims(parameter, shards[key].local, dims)
        return shards

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        if not self.is_finite(finite):
            return
        self.divide_gradients(divisor)
        parts = [list(self._square_sums(parameter)) for parameter in self.parameters]
        sums = self._sum_over_ranks(list(chain.from_iterable(parts)))
        updates = [
            self._update(parameter, lr, *islice(sums, len(own)))
            for parameter, own in zip(self.parameters, parts, strict=True)
        ]
        totals = self._sum_over_ranks([self._total(p, u) for p, (u, _) in zip(self.parameters, updates, strict=True)])
        for parameter, (update, rate), total in zip(self.parameters, updates, totals, strict=True):
            rms = self._root_mean_square(parameter, total)
            parameter.local.sub_(update.mul_(rate / torch.clamp(rms / MAX_UPDATE_RMS, min=1.0)))

    def _square_sums(self, parameter: OptimizedParameter) -> Iterator[Tensor]:
        """The share of this rank in sums over the full parameter: its squares, and for a matrix the squares of the rows
        and columns of its gradient, and the second moments of its rows. A gradient that is missing counts as zeros, so
        that the messages of all ranks have the same sizes.
        """
        yield self._total(parameter, parameter.local)
        gradient = torch.zeros_like(parameter.local) if parameter.local.grad is None else parameter.local.grad
        if gradient.ndim >= 2:
            (rows, columns), dims = row_and_column_dims(parameter), tuple(range(gradient.ndim))
            square, row_var = gradient.square(), self.state[parameter.local]["row_var"]
            yield self._in_full(parameter, square.sum(-1), dims, rows)
            yield self._in_full(parameter, square.sum(-2), dims, columns)
            yield self._in_full(parameter, row_var.sum(-1), rows, rows[:-1])

    def _total(self, parameter: OptimizedParameter, local: Tensor) -> Tensor:
        """The share of this rank in the sum of squares of each matrix, or of the whole tensor."""
        square, dims = local.detach().square(), tuple(range(local.ndim))
        if local.ndim == 3:
            return self._in_full(parameter, square.sum((-2, -1)), dims, (0,))
        return self._in_full(parameter, square.sum(), dims, ())

    def _in_full(
        self, parameter: OptimizedParameter, sums: Tensor, dims: tuple[int, ...], kept: tuple[int, ...]
    ) -> Tensor:
        """Sums of a tensor with the dimensions `dims` of the parameter, of which they have those `kept`, in their place
        among zeros. Of the ranks with the same shard of the tensor, one adds it to the sum.
        """
        axes = axes_of_dims(parameter, dims)
        full = sums.new_zeros([parameter.shard.shape[dim] for dim in kept])
        if not self.sharded or self.layout.replica_group(self.world.rank, axes)[0] == self.world.rank:
            full[own_region(parameter, kept)] = sums
        return full

    def _sum_over_ranks(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Sums tensors over all ranks by one all-reduce."""
        if not self.sharded or self.group is None:
            return iter(parts)
        flat = torch.cat([part.reshape(-1) for part in parts])
        heartbeat = self.world.heartbeat
        heartbeat.collective("sums of squares")
        heartbeat.set_waiting(True)
        dist.all_reduce(flat, group=self.group)
        heartbeat.set_waiting(False)
        split = flat.split([part.numel() for part in parts])
        return (values.view(part.shape) for values, part in zip(split, parts, strict=True))

    def _root_mean_square(self, parameter: OptimizedParameter, total: Tensor) -> Tensor:
        """Of each matrix, or of the whole tensor, from its sum of squares; it broadcasts to the local shard."""
        shape = parameter.shard.shape
        if len(shape) == 3:
            return (total[own_region(parameter, (0,))] / (shape[1] * shape[2])).sqrt()[:, None, None]
        return (total / prod(shape)).sqrt()

    def _update(self, parameter: OptimizedParameter, lr: float, total: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the second moments and applies weight decay; returns the update before clipping, and its rate. A
        parameter without a gradient does not change.
        """
        local, settings, state = parameter.local, parameter.settings, self.state[parameter.local]
        gradient, rate, eps = local.grad, lr * settings.lr_factor, torch.finfo(local.dtype).eps
        if gradient is None:
            return torch.zeros_like(local), torch.zeros_like(total)
        state["step"] += 1
        time = state["step"].to(local.dtype)
        weight = time**BETA2_DECAY
        rms = self._root_mean_square(parameter, total)
        relative = torch.clamp(rms, min=MIN_RMS) * torch.clamp(time**-0.5, max=rate)
        local.mul_(1 - rate * settings.weight_decay)
        if local.ndim < 2:
            variance = state["variance"].lerp_(gradient.square(), weight)
        else:
            shape, (row_dims, column_dims) = parameter.shard.shape, row_and_column_dims(parameter)
            row_sums, column_sums, row_total = sums
            means = torch.lerp(row_total / shape[-2], row_sums.mean(-1) / shape[-1], weight)
            rows = state["row_var"].lerp_(row_sums[own_region(parameter, row_dims)] / shape[-1], weight)
            columns = state["col_var"].lerp_(column_sums[own_region(parameter, column_dims)] / shape[-2], weight)
            means = means[own_region(parameter, row_dims[:-1])].clamp(min=eps)
            variance = rows[..., :, None] * columns[..., None, :] / means[..., None, None]
        return variance.clamp(min=eps * eps).rsqrt_().mul_(gradient), relative


def row_and_column_dims(parameter: OptimizedParameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a parameter that the second moments of its rows and of its columns have."""
    *stack, row, column = range(len(parameter.shard.shape))
    return (*stack, row), (*stack, column)


def own_region(parameter: OptimizedParameter, dims: tuple[int, ...]) -> tuple[slice, ...]:
    """The region of this rank's shard in these dimensions of the parameter."""
    offset, size = parameter.shard.offset, parameter.shard.local.shape
    return tuple(slice(offset[dim], offset[dim] + size[dim]) for dim in dims)


def axes_of_dims(parameter: OptimizedParameter, dims: tuple[int, ...]) -> frozenset[str]:
    """The axes that shard these dimensions of a parameter."""
    sharding = sharding_of_tensor(parameter.parameter)
    return frozenset(name for axis, dim in sharding if dim in dims for name in axis.split("+"))


def shard_of_dims(parameter: OptimizedParameter, local: Tensor, dims: tuple[int, ...]) -> LocalShard:
    """The shard of a tensor that has some dimensions of a parameter."""
    shape, offset = parameter.shard.shape, parameter.shard.offset
    return LocalShard(
        local,
        tuple(shape[dim] for dim in dims),
        tuple(offset[dim] for dim in dims),
        axes_of_dims(parameter, dims),
    )
