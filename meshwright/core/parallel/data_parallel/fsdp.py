"""Sharded data parallelism by FSDP2: blocks are FSDP units, and gradients are summed over data-parallel ranks.

| layout.shard | after forward | gradients are reduced | unsharded meanwhile |
|---|---|---|---|
| optimizer (ZeRO-1) | parameters stay unsharded | once per step | parameters and gradients |
| gradients (ZeRO-2) | parameters stay unsharded | in every micro-step | parameters |
| parameters (ZeRO-3) | parameters are resharded | in every micro-step | the units in use |

With replicas of shards (replicate x shard, HSDP), replicas all-reduce once per step. FSDP2 averages gradients by
default, and does so differently in float32 and float64. The step has already divided the loss, so a sum is forced.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import TORCH_NAMES, rounds_weights
from meshwright.base.topology.parameter_shapes import fsdp_shard_dim
from meshwright.core.parallel.data_parallel.rank_agreement import BlockCalls
from meshwright.core.parallel.expert_parallel import find_expert_weights
from meshwright.core.parallel.mesh import Meshes
from meshwright.core.parallel.parallel_model import ParallelModel, rounded_parameters
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, fsdp_units
from meshwright.core.torch_private import backward_id, fsdp_tensors, keep_reduced_gradients
from meshwright.errors import ConfigError

Sharding = Literal["none", "optimizer", "gradients", "parameters"]


class FSDPModel(ParallelModel):
    """A model or a pipeline stage that fully_shard wraps; `allocate` allocates each unit just before it is sharded."""

    def __init__(
        self,
        module: nn.Module,
        spec: ParallelSpec,
        config: RunConfig,
        meshes: Meshes,
        allocate: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(module)
        self.sharding: Sharding = config.layout.shard
        self.last_micro_step: bool | None = None
        # Replicas that are not sharded reshard too: unsharding one is only a copy in memory. Pipeline stages do not:
        # schedules that split backward collect the weights between its halves.
        self.reshards = self.sharding == "parameters" or (self.sharding == "none" and config.layout.pipeline == 1)
        reshard: bool | int = self.reshards
        if self.sharding == "parameters" and config.fsdp.ranks_after_forward is not None:
            reshard = config.fsdp.ranks_after_forward if config.fsdp.ranks_after_forward > 1 else False
        data_mesh = meshes.data_mesh
        self.mesh_size = data_mesh.size()
        units, first_unit = fsdp_units(module, spec)
        # Under expert parallelism, expert weights have a smaller shard group than their block.
        for expert_weights in find_expert_weights(module, spec) if meshes.expert_mesh is not None else []:
            allocate(expert_weights)
            ignore_view_warning([expert_weights])
            fully_shard(
                expert_weights,
                mesh=meshes.expert_data_mesh,
                reshard_after_forward=reshard,
                mp_policy=mixed_precision_policy(config, self.mesh_size, first=False),
                shard_placement_fn=partial(shard_placement, meshes.expert_data_mesh),
            )
            reduce_in_place(as_fsdp_module(expert_weights), meshes.expert_data_mesh)
        for unit in units:
            for child in unit:
                allocate(child)
            ignore_view_warning(unit)
            fully_shard(
                unit,
                mesh=data_mesh,
                reshard_after_forward=reshard,
                mp_policy=mixed_precision_policy(config, self.mesh_size, first=unit is first_unit),
                shard_placement_fn=partial(shard_placement, data_mesh),
                ignored_params=set(find_scalars(*unit)),
            )
            reduce_in_place(as_fsdp_module(unit[0]), data_mesh)
        allocate(module)  # the parameters of no other unit
        ignore_view_warning([module])
        fully_shard(
            module,
            mesh=data_mesh,
            # Backward begins with the root: one rank would free its parameters and copy them again at once.
            reshard_after_forward=reshard if data_mesh.size(-1) > 1 else False,
            mp_policy=mixed_precision_policy(config, self.mesh_size, first=True),
            ignored_params=set(find_scalars(module)),
        )
        self.root = as_fsdp_module(module)
        reduce_in_place(self.root, data_mesh)
        self.block_calls = BlockCalls(block for block in find_blocks(module, spec) if block is not module)
        for unit_module in self.units():
            if self.mesh_size > 1:  # one rank would copy its gradients to divide them by 1
                unit_module.set_gradient_divide_factor(1.0)
            unit_module.set_force_sum_reduction_for_comms(True)
            if config.ddp.find_unused_parameters:
                allow_unused_parameters(unit_module)
        self.groups = [data_mesh.get_group(axis) for axis in reversed(data_mesh.mesh_dim_names or ())]
        self._prefetch([as_fsdp_module(unit[0]) for unit in units], config.fsdp.prefetch)

    def units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _prefetch(self, units: list[FSDPModule], ahead: int) -> None:
        if ahead == 1:
            return  # the default of FSDP2, which follows the order of use
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1])

    def keep_float32_gradients(self) -> None:
        """Lets rounded weights keep the float32 sums of their gradients, if there is more than one rank to sum over."""
        if self.mesh_size > 1 and any(True for _ in rounded_parameters(self.module)):
            keep_reduced_gradients(self.module)
            for parameter in rounded_parameters(self.module):
                parameter.grad_dtype = torch.float32

    def accumulate(self, micro_batches: int) -> None:
        """FSDP2 accumulates in the dtype of the reduction."""
        self.micro_batches = micro_batches

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        if last != self.last_micro_step:  # each of these calls visits all modules
            self.last_micro_step = last
            self.root.set_requires_gradient_sync(last or self.sharding in ("gradients", "parameters"))
            self.root.set_requires_all_reduce(last)
            self.root.set_reshard_after_backward(last or self.reshards)
        self.broadcast_buffers()  # as DDP does
        with super().micro_step(last):
            yield
        if last:
            self.reduce_scalars()

    def reduce_scalars(self) -> None:
        """Sums the gradients of scalars over data-parallel ranks. FSDP2 cannot shard them, so they are replicated."""
        for scalar in (scalar for scalar in find_scalars(self.module) if scalar.requires_grad):
            scalar.grad = torch.zeros_like(scalar, dtype=scalar.grad_dtype) if scalar.grad is None else scalar.grad
            for group in self.groups:
                dist.all_reduce(scalar.grad, group=group)

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return fsdp_tensors(self.module)

    def pop_block_calls(self) -> int:
        return self.block_calls.pop()

    def reshard(self) -> None:
        for unit in self.units():
            unit.reshard()


def find_scalars(*modules: nn.Module) -> list[nn.Parameter]:
    """The parameters without a dimension, each once."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.ndim == 0))


def ignore_view_warning(unit: list[nn.Module]) -> None:
    """Silences FSDP2's warning about a unit whose output is a view, which is for changes in place. Modules of this
    package and of torch make none; the warning stays on for users' modules.
    """
    if all(type(module).__module__.startswith(("meshwright.", "torch.")) for module in unit):
        names = ", ".join(f"FSDP{type(module).__name__}" for module in unit)
        warnings.filterwarnings(
            "ignore", message=rf"FSDP2-wrapped module \({re.escape(names)}\) returned a view tensor"
        )


def allow_unused_parameters(unit: FSDPModule) -> None:
    """Makes FSDP2 reduce zeros for unused parameters. By default it packs only the gradients that a rank has, and ranks
    would sum gradients of different parameters.
    """
    if not hasattr(unit, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "ddp.find_unused_parameters = true with FSDP2 needs torch 2.13 or newer",
            "try ddp.find_unused_parameters = false",
        )
    unit.set_reduce_scatter_unused_params(True)


def shard_placement(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    """The dimension of a parameter that FSDP2 shards. The last dimension of the mesh is the shard dimension."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(fsdp_shard_dim(tuple(local.shape), mesh.size(-1)))


def reduce_in_place(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """Spares a unit that is sharded over one rank a copy of its gradients."""
    if mesh.size(-1) == 1:
        unit.set_custom_reduce_scatter(InPlaceReduceScatter())  # type: ignore[arg-type]


class InPlaceReduceScatter:
    """The reduce-scatter of a shard group of one rank. FSDP2 copies its input to its output instead of calling it; both
    are one tensor here, and torch does not copy a tensor to itself. FSDP2 allocates the input first, on the stream that
    computes, and then the output, on the stream that reduces. The input of a backward that raised in between is dropped
    by the next one.
    """

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.backward = -1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None or self.backward != backward_id():
            self.backward = backward_id()
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        output, self.input = self.input, None
        if output.is_cuda:  # its memory is not reused before the stream that reduces has used it
            output.record_stream(torch.cuda.current_stream(device))
        return output


def mixed_precision_policy(config: RunConfig, ranks: int, first: bool) -> MixedPrecisionPolicy:
    """Units are unsharded in the compute dtype, except for the first: the embedding sets the precision of the residual
    stream. Gradients are reduced in the dtype of the parameters; one rank has nothing to reduce for rounded weights.
    """
    reduce_dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    compute = getattr(torch, TORCH_NAMES[config.precision.compute])
    return MixedPrecisionPolicy(
        param_dtype=None if first or compute == reduce_dtype else compute,
        reduce_dtype=None if ranks == 1 and rounds_weights(config) else reduce_dtype,
        cast_forward_inputs=False,
    )


def as_fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
