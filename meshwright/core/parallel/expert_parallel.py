"""Expert parallelism: experts are divided among ranks, and tokens travel to their experts and back by all-to-all.

With n ranks and E experts, rank i has experts [i E / n, (i + 1) E / n). A forward pass exchanges the number of rows for
each expert, the rows, and the experts' outputs; backward exchanges the gradients of the last two. Every rank makes the
same calls in the same order, even if it has no rows to send or to receive.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshwright.core.models.layers.expert_rows import row_order
from meshwright.core.models.layers.expert_weights import ExpertMatrices, ExpertWeights
from meshwright.core.models.layers.experts import ExpertDispatch, Experts, SequenceCounts
from meshwright.core.parallel.all_to_all import all_to_all
from meshwright.core.parallel.mesh import Meshes
from meshwright.core.parallel.parallel_spec import ParallelSpec, copy_module, find_modules
from meshwright.core.torch_private import is_fake
from meshwright.errors import ConfigError

SUM_TOLERANCE = 0.05
"""The relative error of half precision; another use of the weights changes the outputs by their own size."""


class AllToAllDispatch(ExpertDispatch):
    """Sends rows, sorted by expert, to the ranks of `group` that have their experts, and the outputs back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


class DispatchedExperts:
    """The forward of a user's module with the weights of this rank's experts, in place of all: rows travel to the ranks
    of their experts, where the module's own forward computes them with one expert and weight 1 per row.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.own_forward, self.name = module, type(module).forward, type(module).__name__
        self.signature = inspect.signature(module.forward)
        self.dispatch = AllToAllDispatch(group)
        self.names = [name for name, _ in module.named_parameters(recurse=False)]
        self.count = len(getattr(module, self.names[0]))
        self.local_count = self.count // group.size()
        numbers = {name: value for name, value in vars(module).items() if type(value) is int and "experts" in name}
        self.count_names = [name for name, value in numbers.items() if value == self.count]
        """attributes with the number of experts, such as `num_experts`"""
        self.checked = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, chosen, weights = self.signature.bind(*args, **kwargs).args
        if not self.checked and not is_fake(hidden):
            self.require_sum_of_experts(hidden, chosen, weights)
            self.checked = True
        active, width = chosen.shape[-1], hidden.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        counts = (chosen.reshape(-1, 1) == torch.arange(self.count, device=chosen.device)).sum(dim=0)
        rows = row_order(order, chosen.numel() // active, active)
        outputs = self.dispatch(partial(self.compute, weights.dtype), rows.gather(hidden.reshape(-1, width)), counts)
        return rows.combine(outputs, weights.reshape(-1, active)).to(hidden.dtype).view(hidden.shape)

    def compute(self, dtype: torch.dtype, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs of this rank's experts for rows that are sorted by expert."""
        parameters = {name: local_weight(self.module, name) for name in self.names}
        if not len(rows):  # the gradients are zero and not missing, and backward takes part in the all-to-all
            return rows + sum(parameter[:0].sum() for parameter in parameters.values())
        local = self.with_experts(parameters, self.local_count)
        expert = torch.arange(self.local_count, device=rows.device).repeat_interleave(counts, output_size=len(rows))
        ones = torch.ones(len(rows), 1, dtype=dtype, device=rows.device)
        return self.own_forward(local, rows, expert[:, None], ones)  # type: ignore[no-any-return]

    def with_experts(self, parameters: dict[str, Tensor], count: int, **attributes: object) -> nn.Module:
        """A copy of the module that has these experts only."""
        return copy_module(self.module, parameters | dict.fromkeys(self.count_names, count) | attributes)

    def require_sum_of_experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """Raises a ConfigError if the arguments are others, or if the module's forward on random rows and weights is
        not the sum of the outputs of single experts, times their weights.
        """
        in_place = hidden.is_floating_point() and not chosen.is_floating_point() and weights.shape == chosen.shape
        if not in_place or self.error_of_sum(hidden, weights) > SUM_TOLERANCE:
            raise ConfigError(
                f"the forward of {self.name}, which ParallelSpec.experts names, is not the sum of the outputs of the "
                "chosen experts times their weights",
                "expected a forward of (hidden states, chosen experts, weights) that is linear in the weights; or try "
                "layout.expert = 1",
            )

    @torch.no_grad()
    def error_of_sum(self, hidden: Tensor, weights: Tensor) -> float:
        """The error of the sum over two experts with random parameters, relative to the largest output."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, like: Tensor) -> Tensor:
            values: Tensor = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return values.to(like.device, like.dtype)

        count, tokens = min(2, self.local_count), 4
        local = {name: local_weight(self.module, name) for name in self.names}
        experts = {name: random(count, *p.shape[1:], like=p) for name, p in local.items()}
        rows = random(tokens, hidden.shape[-1], like=hidden) * hidden.shape[-1] ** 0.5
        scales = random(tokens, count, like=weights).abs() + 0.1
        chosen = torch.arange(count, device=hidden.device).expand(tokens, count)
        expected = self.own_forward(self.with_experts(experts, count, training=False), rows, chosen, scales)
        total = torch.zeros_like(expected)
        for index in range(count):
            one = self.with_experts({name: p[index : index + 1] for name, p in experts.items()}, 1, training=False)
            first = torch.zeros_like(chosen[:, :1])
            total += self.own_forward(one, rows, first, torch.ones_like(scales[:, :1])) * scales[:, index, None]
        return float((total - expected).abs().max() / expected.abs().max())


def apply_expert_parallel(model: nn.Module, spec: ParallelSpec, meshes: Meshes) -> None:
    """Divides the experts among the ranks of the expert axis. Tensor-parallel ranks, which have different chunks of the
    sequence here, hold the same experts and routers, and their gradients are partial sums.
    """
    tensor_mesh = meshes.submesh("tensor")
    for experts in find_expert_weights(model, spec):
        if meshes.expert_mesh is not None:
            assert meshes.expert_group is not None
            if not isinstance(experts, ExpertWeights):
                require_divisible(experts, spec, meshes.expert_group.size(), tensor_mesh)
                experts.forward = DispatchedExperts(experts, meshes.expert_group)
            names = tuple(axis for axis in meshes.expert_mesh.mesh_dim_names or () if axis in ("expert", "tensor"))
            distribute_parameters(experts, meshes.expert_mesh[names], [Shard(0), Replicate()][: len(names)])
        elif tensor_mesh is not None and isinstance(experts, ExpertWeights):
            distribute_parameters(experts, tensor_mesh, [Replicate()])
    for layer in (module for module in model.modules() if isinstance(module, Experts)):
        apply_to_layer(layer, meshes, tensor_mesh)


def apply_to_layer(layer: Experts, meshes: Meshes, tensor_mesh: DeviceMesh | None) -> None:
    """The router, the dispatch and the balance loss around the experts of a built-in family."""
    if meshes.expert_group is not None:
        layer.dispatch = AllToAllDispatch(meshes.expert_group)
    if tensor_mesh is not None:
        distribute_parameters(layer.router, tensor_mesh, [Replicate()])
    layer.bank.weights = partial(local_expert_matrices, layer.bank)  # type: ignore[method-assign]
    layer.router.matrix = partial(local_weight, layer.router, "weight")  # type: ignore[method-assign]
    if meshes.sequence_group is not None:
        layer.sequence_counts = AllReduceCounts(meshes.sequence_group)


def require_divisible(module: nn.Module, spec: ParallelSpec, ranks: int, tensor_mesh: DeviceMesh | None) -> None:
    """Raises a ConfigError if the experts of a user's module cannot be divided among ranks."""
    name = f"ParallelSpec.experts = {spec.experts.removeprefix('model.')}"
    own = list(module.parameters(recurse=False))
    sizes = {parameter.shape[:1] for parameter in own}
    arguments = len(inspect.signature(module.forward).parameters)
    if len(sizes) != 1 or len(own) != len(list(module.parameters())) or arguments != 3:
        raise ConfigError(
            f"{name} matches {type(module).__name__}, whose parameters have the first dimensions "
            f"{sorted(parameter.shape[0] for parameter in module.parameters() if parameter.ndim)}",
            "expected a module with the weights of all experts, whose first dimension is that of the experts, and a "
            "forward of (hidden states, chosen experts, weights)",
        )
    (count,) = sizes.pop()
    if count % ranks:
        raise ConfigError(
            f"layout.expert = {ranks} does not divide the {count} experts of {type(module).__name__}",
            "try a layout.expert that divides them",
        )
    if tensor_mesh is not None:
        raise ConfigError(
            "layout.expert with layout.tensor is unsupported for a user's model: tensor-parallel ranks have the same "
            "tokens, and each would send them",
            "try layout.tensor = 1",
        )


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


def find_expert_weights(model: nn.Module, spec: ParallelSpec) -> list[nn.Module]:
    """The modules with the weights of all experts, or with those of this rank."""
    return find_modules(model, spec.experts) if spec.experts else []
