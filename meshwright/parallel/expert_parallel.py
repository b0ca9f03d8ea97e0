"""Expert parallelism: experts are divided among ranks, and tokens travel to their experts and back by all-to-all.

With n ranks and E experts, rank i has experts [i E / n, (i + 1) E / n). A forward pass exchanges the number of rows for
each expert, the rows, and the experts' outputs; backward exchanges the gradients of the last two. Every rank makes the
same calls in the same order, even if it has no rows to send or to receive.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshwright.models.expert_weights import ExpertMatrices, ExpertWeights
from meshwright.models.experts import ExpertDispatch, Experts, SequenceCounts
from meshwright.parallel.all_to_all import all_to_all
from meshwright.parallel.mesh import Meshes


class AllToAllDispatch(ExpertDispatch):
    """Sends rows, sorted by expert, to the ranks of `group` that have their experts, and the outputs back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, expert_weights: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self.group.size()
        receive_counts = torch.empty_like(counts)
        dist.all_to_all_single(receive_counts, counts.contiguous(), group=self.group)
        both_counts = torch.stack((counts, receive_counts)).view(2, ranks, -1)  # (direction, rank, local expert)
        send_sizes, receive_sizes = self.split_sizes(both_counts, len(rows))
        received = all_to_all(rows, self.group, send_sizes, receive_sizes)
        order = expert_sort_order(both_counts[1], sum(receive_sizes))
        outputs = expert_weights(received.index_select(0, order), both_counts[1].sum(dim=0))
        by_rank = outputs.new_zeros(outputs.shape).index_copy(0, order, outputs)
        return all_to_all(by_rank, self.group, receive_sizes, send_sizes)

    def split_sizes(self, both_counts: Tensor, _rows: int) -> tuple[list[int], list[int]]:
        """The rows sent to and received from each rank. This is the only point where the host waits for the device."""
        send_sizes, receive_sizes = both_counts.sum(dim=2).tolist()
        return send_sizes, receive_sizes


def expert_sort_order(counts: Tensor, rows: int) -> Tensor:
    """The permutation that sorts received rows by local expert. They arrive by rank, and from each rank by expert;
    `counts` has the number of each, (rank, local expert).
    """
    ranks, local_experts = counts.shape
    expert = torch.arange(local_experts, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


class AllReduceCounts(SequenceCounts):
    """Sums the expert counts of sequences over the ranks of `group`, which have chunks of the same sequences."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


def apply_expert_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Divides the experts among the ranks of the expert axis. Tensor-parallel ranks, which have different chunks of the
    sequence here, hold the same experts and routers, and their gradients are partial sums.
    """
    tensor_mesh = meshes.submesh("tensor")
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        if meshes.expert_mesh is not None:
            names = tuple(axis for axis in meshes.expert_mesh.mesh_dim_names or () if axis in ("expert", "tensor"))
            distribute_parameters(experts.bank, meshes.expert_mesh[names], [Shard(0), Replicate()][: len(names)])
            assert meshes.expert_group is not None
            experts.dispatch = AllToAllDispatch(meshes.expert_group)
        elif tensor_mesh is not None:
            distribute_parameters(experts.bank, tensor_mesh, [Replicate()])
        if tensor_mesh is not None:
            distribute_parameters(experts.router, tensor_mesh, [Replicate()])
        expert_weights, router = experts.bank, experts.router
        expert_weights.weights = partial(local_expert_matrices, expert_weights)  # type: ignore[method-assign]
        router.matrix = partial(local_weight, router, "weight")  # type: ignore[method-assign]
        if meshes.sequence_group is not None:
            experts.sequence_counts = AllReduceCounts(meshes.sequence_group)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Converts the direct parameters of a module to DTensors without communication."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def local_expert_matrices(expert_weights: ExpertWeights) -> ExpertMatrices:
    return (
        local_weight(expert_weights, "gate"),
        local_weight(expert_weights, "up"),
        local_weight(expert_weights, "down"),
    )


def local_weight(module: nn.Module, name: str) -> Tensor:
    """The local tensor of a parameter, with its autograd graph. Where it is replicated, ranks process different tokens,
    so the local gradient is a partial sum.
    """
    weight = getattr(module, name)
    if not isinstance(weight, DTensor):
        return weight  # type: ignore[no-any-return]
    grad_placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=grad_placements)


def find_expert_weights(model: nn.Module) -> list[ExpertWeights]:
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]
