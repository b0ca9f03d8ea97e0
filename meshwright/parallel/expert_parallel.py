"""Expert parallelism: the experts are divided among ranks, and rows travel to their experts and back by all-to-all.

Of n ranks and E experts, rank i holds experts [i E / n, (i + 1) E / n). A pass sends, forward: how many rows are meant
for each expert, the rows, and what their experts made of them; backward: the gradients of the last two. Every rank
makes each of these calls in the same order, also one that has nothing to send or to receive.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshwright.models.expert_weights import ExpertWeights, Matrices
from meshwright.models.experts import ExpertDispatch, Experts, SequenceCounts
from meshwright.parallel.all_to_all import all_to_all
from meshwright.parallel.mesh import Meshes


class AllToAllDispatch(ExpertDispatch):
    """Rows, sorted by expert, to the ranks of `group` that hold their experts, through the bank, and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, bank: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self.group.size()
        meant = torch.empty_like(counts)
        dist.all_to_all_single(meant, counts.contiguous(), group=self.group)
        both = torch.stack((counts, meant)).view(2, ranks, -1)  # (which way, rank, local expert)
        going, coming = self.split_sizes(both, len(rows))
        here = all_to_all(rows, self.group, going, coming)
        order = expert_sort_order(both[1], sum(coming))
        made = bank(here.index_select(0, order), both[1].sum(dim=0))
        back = made.new_zeros(made.shape).index_copy(0, order, made)
        return all_to_all(back, self.group, coming, going)

    def split_sizes(self, both: Tensor, _rows: int) -> tuple[list[int], list[int]]:
        """Rows that go to each rank and come from it. The one place where the host waits for the device."""
        going, coming = both.sum(dim=2).tolist()
        return going, coming


def expert_sort_order(counts: Tensor, rows: int) -> Tensor:
    """The order that sorts rows by local expert. They come by rank, and of each rank by expert; `counts` says how many
    of each, (rank, local expert).
    """
    ranks, local = counts.shape
    expert = torch.arange(local, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


class AllReduceCounts(SequenceCounts):
    """How often each sequence chose each expert, where the ranks of `group` hold pieces of the same sequences."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


def apply_expert_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Each rank of the expert axis keeps its own experts. Ranks of the tensor axis, which have pieces of the sequence
    between matrices, hold the same experts and routers, and their gradients are parts of a sum.
    """
    tensor = meshes.submesh("tensor")
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        if meshes.expert_mesh is not None:
            names = tuple(axis for axis in meshes.expert_mesh.mesh_dim_names or () if axis in ("expert", "tensor"))
            distribute_parameters(experts.bank, meshes.expert_mesh[names], [Shard(0), Replicate()][: len(names)])
            assert meshes.expert_group is not None
            experts.dispatch = AllToAllDispatch(meshes.expert_group)
        elif tensor is not None:
            distribute_parameters(experts.bank, tensor, [Replicate()])
        if tensor is not None:
            distribute_parameters(experts.router, tensor, [Replicate()])
        bank, router = experts.bank, experts.router
        bank.weights = partial(local_expert_matrices, bank)  # type: ignore[method-assign]
        router.matrix = partial(local_weight, router, "weight")  # type: ignore[method-assign]
        if meshes.sequence_group is not None:
            experts.sequence_counts = AllReduceCounts(meshes.sequence_group)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """A module's own parameters as DTensors, each rank from its own copy."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))


def local_expert_matrices(bank: ExpertWeights) -> Matrices:
    return local_weight(bank, "gate"), local_weight(bank, "up"), local_weight(bank, "down")


def local_weight(module: nn.Module, name: str) -> Tensor:
    """With its graph. Along an axis on which ranks hold the same weight each sees other tokens."""
    weight = getattr(module, name)
    if not isinstance(weight, DTensor):
        return weight  # type: ignore[no-any-return]
    parts = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=parts)


def find_expert_weights(model: nn.Module) -> list[ExpertWeights]:
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]
