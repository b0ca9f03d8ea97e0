"""The tensors of a run by what they are (parameter, buffer, optimizer state), never by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.base.topology.axes import AXES
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.unsharded import digest_of_lines, tensor_digest_line
from meshwright.core.parallel.local_shard import LocalShard, full_tensor, local_shard
from meshwright.core.parallel.world import World

CheckpointState = dict[str, Tensor | LocalShard]
"""Name -> a full tensor, or the local shard of this rank."""


def collect_state(
    model: nn.Module, parameters: Mapping[str, Tensor], moments: Mapping[str, LocalShard]
) -> CheckpointState:
    """Every tensor that a resumed run needs, under a name that does not depend on the layout.

    `parameters` are the parameters of the model as they are between steps, sharded; `moments` are the optimizer state,
    keyed by parameter name / state key.
    """
    state: CheckpointState = {f"model/{name}": local_shard(parameter) for name, parameter in parameters.items()}
    persistent = model.state_dict(keep_vars=True)
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    return state | {f"optimizer/{name}": shard for name, shard in moments.items()}


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def parameters_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of the name, shape and bytes of every parameter."""
    return digest_of_lines(parameter_digest_lines(named))


def digest_parallel_parameters(named: Mapping[str, Tensor], layout: Layout, world: World, collective: bool) -> str:
    """`parameters_digest` of a parallelized model, on rank 0; '' on other ranks.

    With `collective`, all ranks of a shard group take part in gathering each full tensor. Pipeline stages follow one
    after the other.
    """
    is_stage_leader = layout.is_first_on(world.rank, [axis for axis in AXES if axis != "pipeline"])
    lines = parameter_digest_lines(named.items(), is_stage_leader) if is_stage_leader or collective else []
    for stage in range(1, layout.pipeline):
        leader = stage * layout.stride("pipeline")
        stage_lines = world.broadcast_object(lines if world.rank == leader else None, "digest of a stage", leader)
        lines += stage_lines if world.rank == 0 else []
    return digest_of_lines(lines) if world.rank == 0 else ""


@torch.no_grad()
def parameter_digest_lines(named: Iterable[tuple[str, Tensor]], wanted: bool = True) -> list[str]:
    """The digest line of every parameter, or none if not `wanted`. The call is collective over each shard group."""
    lines = []
    for name, parameter in named:
        full = full_tensor(parameter)
        if wanted:
            lines.append(tensor_digest_line(name, dtype_name(parameter), parameter.shape, tensor_bytes(full.cpu())))
    return lines
