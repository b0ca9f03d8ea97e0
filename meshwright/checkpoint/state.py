"""The tensors of a run by what they are (parameter, buffer, optimizer's), never by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.checkpoint.unsharded import digest_of_lines, tensor_digest_line
from meshwright.parallel.local_shard import LocalShard, full_tensor, local_shard
from meshwright.parallel.world import World
from meshwright.topology.axes import AXES
from meshwright.topology.layout import Layout

CheckpointState = dict[str, Tensor | LocalShard]
"""Name -> a whole tensor, or this rank's block of one."""


def collect_state(
    model: nn.Module, parameters: Mapping[str, Tensor], moments: Mapping[str, LocalShard]
) -> CheckpointState:
    """Every tensor that a resumed run needs, under a name that no layout changes. `parameters` are the model's as they
    are between steps, whatever is gathered just now; `moments` are the optimizer's, as parameter name / key.
    """
    state: CheckpointState = {f"model/{name}": local_shard(parameter) for name, parameter in parameters.items()}
    kept = model.state_dict(keep_vars=True)
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name in kept}
    return state | {f"optimizer/{name}": block for name, block in moments.items()}


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A host tensor's bytes, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def parameters_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of every parameter's name, shape and bytes."""
    return digest_of_lines(parameter_digest_lines(named))


def digest_parallel_parameters(named: Mapping[str, Tensor], layout: Layout, world: World, together: bool) -> str:
    """The same of a model that is spread over ranks, on rank 0: blocks are put together by all of their holders, stages
    of a pipeline one after the other.
    """
    leads = layout.is_first_on(world.rank, [axis for axis in AXES if axis != "pipeline"])
    lines = parameter_digest_lines(named.items(), leads) if leads or together else []
    for stage in range(1, layout.pipeline):
        leader = stage * layout.stride("pipeline")
        told = world.broadcast_object(lines if world.rank == leader else None, "digest of a stage", leader)
        lines += told if world.rank == 0 else []
    return digest_of_lines(lines) if world.rank == 0 else ""


@torch.no_grad()
def parameter_digest_lines(named: Iterable[tuple[str, Tensor]], wanted: bool = True) -> list[str]:
    """What is digested of each; none where it is not `wanted`. Ranks that hold blocks of one must all ask."""
    lines = []
    for name, parameter in named:
        whole = full_tensor(parameter)
        if wanted:
            lines.append(tensor_digest_line(name, dtype_name(parameter), parameter.shape, tensor_bytes(whole.cpu())))
    return lines
