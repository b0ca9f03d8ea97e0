"""Sharding by FSDP2: each unit of the model is gathered for its use, its gradients are summed once and scattered.

| what is divided | between forward and backward | gradients meet | held in full meanwhile |
|---|---|---|---|
| optimizer  | stays gathered    | once a step       | parameters and gradients |
| gradients  | stays gathered    | every micro-step  | parameters |
| parameters | gathered again    | every micro-step  | the units in use |

With copies beside shards (replicate x shard) the copies' gradients meet once a step. FSDP2's default is the mean over
ranks, by another path in float32 than in float64; the step has divided already, so a plain sum is forced on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.config import RunConfig
from meshwright.config.dtypes import TORCH_NAMES
from meshwright.errors import ConfigError
from meshwright.parallel.expert_parallel import find_expert_weights
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.parallel_spec import ParallelSpec, fsdp_units
from meshwright.topology.parameter_shapes import fsdp_shard_dim
from meshwright.torch_private import fsdp_tensors

# FSDP2 warns of in-place changes to what a unit gives on. Ours makes none; a user's own unit is still warned of.
OURS = "Embedding|RMSNorm, FSDPHeadLoss|Block|LanguageModel|Stage|Bank"
warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP({OURS})\) returned a view tensor")

What = Literal["none", "optimizer", "gradients", "parameters"]


class FSDPModel(ParallelModel):
    """A module whose units are sharded over the mesh's data axes; `ready` fills a unit's weights just before."""

    def __init__(
        self,
        module: nn.Module,
        parts: ParallelSpec,
        config: RunConfig,
        meshes: Meshes,
        ready: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(module)
        self.sharding: What = config.layout.shard
        self.last: bool | None = None
        # Where copies are all there is beside tensor, a unit that is let go costs a copy in memory to get back. Stages
        # keep theirs: schedules that split backward look for weights between its halves.
        self.reshards = self.sharding == "parameters" or (self.sharding == "none" and config.layout.pipeline == 1)
        reshard: bool | int = self.reshards
        if self.sharding == "parameters" and config.fsdp.ranks_after_forward is not None:
            reshard = config.fsdp.ranks_after_forward if config.fsdp.ranks_after_forward > 1 else False
        data = meshes.data_mesh
        units, leading = fsdp_units(module, parts)
        for bank in find_expert_weights(module) if meshes.expert_mesh is not None else []:  # gathered among fewer ranks
            ready(bank)
            fully_shard(
                bank,
                mesh=meshes.expert_data_mesh,
                reshard_after_forward=reshard,
                mp_policy=mixed_precision_policy(config, first=False),
                shard_placement_fn=partial(shard_placement, meshes.expert_data_mesh),
            )
        for unit in units:
            for piece in unit:
                ready(piece)
            fully_shard(
                unit,
                mesh=data,
                reshard_after_forward=reshard,
                mp_policy=mixed_precision_policy(config, first=unit is leading),
                shard_placement_fn=partial(shard_placement, data),
            )
        ready(module)  # what is in no unit
        fully_shard(
            module, mesh=data, reshard_after_forward=reshard, mp_policy=mixed_precision_policy(config, first=True)
        )
        self.root = as_fsdp_module(module)
        for part in self.units():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if config.ddp.find_unused_parameters:
                allow_unused(part)
        self.groups = [data.get_group(axis) for axis in reversed(data.mesh_dim_names or ())]
        self._prefetch([as_fsdp_module(unit[0]) for unit in units], config.fsdp.prefetch)

    def units(self) -> list[FSDPModule]:
        return [as_fsdp_module(part) for part in self.module.modules() if isinstance(part, FSDPModule)]

    def _prefetch(self, units: list[FSDPModule], ahead: int) -> None:
        if ahead == 1:
            return  # FSDP2's own way, which follows the order that it sees
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1])

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        if last != self.last:  # each of these walks all modules
            self.last = last
            self.root.set_requires_gradient_sync(last or self.sharding in ("gradients", "parameters"))
            self.root.set_requires_all_reduce(last)
            self.root.set_reshard_after_backward(last or self.reshards)
        self.broadcast_buffers()  # as DDP does
        with super().micro_step(last):
            yield

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return fsdp_tensors(self.module)

    def reshard(self) -> None:
        for part in self.units():
            part.reshard()


def allow_unused(part: FSDPModule) -> None:
    """Else FSDP2 packs what has a gradient here, and ranks add up gradients of different parameters."""
    if not hasattr(part, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "ddp.find_unused_parameters with shard needs torch 2.13", "allowed: ddp.find_unused_parameters = false"
        )
    part.set_reduce_scatter_unused_params(True)


def shard_placement(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    """By which dimension a unit's parameter is divided. The mesh's last dimension is that of shards."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(fsdp_shard_dim(tuple(local.shape), mesh.size(-1)))


def mixed_precision_policy(config: RunConfig, first: bool) -> MixedPrecisionPolicy:
    """Units are gathered in the precision of compute. The first holds the embedding, which sets the precision of the
    residual stream: it is gathered as it is. Gradients are summed in that of the weights.
    """
    summed = torch.float64 if config.precision.compute == "fp64" else torch.float32
    compute = getattr(torch, TORCH_NAMES[config.precision.compute])
    return MixedPrecisionPolicy(
        param_dtype=None if first or compute == summed else compute,
        reduce_dtype=summed,
        cast_forward_inputs=False,
    )


def as_fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
