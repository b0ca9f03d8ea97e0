"""Tensor and sequence parallelism by DTensor, with a vocabulary-parallel embedding and loss.

The first matrices of a block are sharded by columns, the last by rows. On entry, the sequence is all-gathered once for
q, k and v (once for gate and up); on exit, partial sums are reduce-scattered over the sequence. So norms and residuals
work on a chunk of the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.models.spec import ModelSpec
from meshwright.core.kernels.cross_entropy import linear_cross_entropy
from meshwright.core.models.layers.loss import HeadLoss, valid_tokens
from meshwright.core.parallel.float8 import linear
from meshwright.core.parallel.parallel_spec import ParallelSpec, parameter_owners, require_modules
from meshwright.core.parallel.tensor_plans.local_styles import LocalStyle
from meshwright.core.parallel.tensor_plans.lora_factors import parallelize_with_factors, with_low_rank
from meshwright.errors import ConfigError

SEQUENCE = 1
"""The sequence dimension of (batch, sequence, width)."""
HEADS = 2
"""The dimension of heads of (batch, sequence, heads, head size)."""


class VocabParallelEmbedding(ParallelStyle):
    """Each rank looks up the tokens of its vocabulary rows; the sum over ranks is scattered over the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_rows(module, device_mesh)
        module.forward = partial(self.lookup, module, device_mesh)
        return module

    @staticmethod
    def lookup(module: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, DTensor)
        rows = weight.to_local()
        index = tokens - len(rows) * mesh.get_local_rank()
        elsewhere = (index < 0) | (index >= len(rows))
        partial_sum = F.embedding(index.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0.0)
        hidden = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
        return hidden.redistribute(placements=[Shard(SEQUENCE)]).to_local()


class GatherSequence(ParallelStyle):
    """All-gathers the sequence of a module's first input, once for all matrices inside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self.gather, device_mesh))
        return module

    @staticmethod
    def gather(mesh: DeviceMesh, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
        if torch.is_autocast_enabled(hidden.device.type):  # the next operator casts anyway: half the bytes
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return hidden.redistribute(placements=[Replicate()]), *rest


class GatherLocalSequence(GatherSequence):
    """All-gathers the sequence for matrices that compute on local tensors: all gradients inside are partial sums, those
    of replicated parameters too.
    """

    @staticmethod
    def gather(mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = GatherSequence.gather(mesh, module, inputs)
        return hidden.to_local(grad_placements=[Partial()]), *rest


class LocalSequence(ParallelStyle):
    """A module that works token by token on the local chunk of the sequence, such as routed experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        module.register_forward_pre_hook(self.to_local)
        return module

    @staticmethod
    def to_local(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden, *rest


class PositionEmbedding(ParallelStyle):
    """A replicated embedding of positions, looked up for the local chunk of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, {"weight": Replicate()})
        module.forward = partial(self.lookup, module, device_mesh)
        return module

    @staticmethod
    def lookup(module: nn.Module, mesh: DeviceMesh, positions: Tensor) -> Tensor:
        chunk = positions.chunk(mesh.size())[mesh.get_local_rank()]
        return F.embedding(chunk, partial_weight(module.weight))


class ColwiseLocal(ParallelStyle):
    """A linear layer sharded by outputs, on a local tensor: the gradient of its input is a partial sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, {"weight": Shard(0)})
        module.forward = partial(self.multiply, module)
        return module

    @staticmethod
    def multiply(module: nn.Module, x: Tensor) -> Tensor:
        return with_low_rank(module, x, linear(module, x, partial_weight(module.weight)))


class RowwiseWithBias(ParallelStyle):
    """A linear layer sharded by inputs; the bias is added to the local chunk of the sequence, after the sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        module.forward = partial(self.multiply, module, device_mesh)
        return module

    @staticmethod
    def multiply(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        local = x.to_local() if isinstance(x, DTensor) else x
        partial_sum = with_low_rank(module, local, linear(module, local, partial_weight(module.weight)))
        out = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
        chunk = out.redistribute(placements=[Shard(SEQUENCE)]).to_local()
        return chunk + partial_weight(module.bias).to(chunk.dtype)


class VocabParallelHead(GatherSequence):
    """The head and its loss, sharded by vocabulary rows: each rank has the full sequence and computes the full loss."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_rows(module, device_mesh)
        module.register_forward_hook(self.to_local_loss)
        if isinstance(module, HeadLoss) and module.fused:
            setattr(module, "forward", partial(self.fused_loss, module, device_mesh))  # noqa: B010
        return super()._apply(module, device_mesh)

    @staticmethod
    def fused_loss(module: HeadLoss, mesh: DeviceMesh, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        weight: Tensor = module.weight
        assert isinstance(hidden, DTensor)
        assert isinstance(weight, DTensor)
        hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
        first, group = len(weight) * mesh.get_local_rank(), mesh.get_group().group_name
        total = linear_cross_entropy(
            hidden, weight, labels, IGNORE_INDEX, module.cap, None, first, group, module.chunk_bytes
        )
        return total, valid_tokens(labels)

    @staticmethod
    def to_local_loss(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = outputs
        return total.to_local() if isinstance(total, DTensor) else total, count


def shard_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the direct parameters of a module by rows."""
    place_parameters(module, mesh, {name: Shard(0) for name, _ in module.named_parameters(recurse=False)})


def place_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Converts direct parameters of a module to DTensors, without communication."""
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def partial_weight(parameter: Any) -> Tensor:
    """The local tensor of a parameter; where it is replicated, its gradient is a partial sum."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "vocab_embedding": VocabParallelEmbedding,
    "vocab_head": VocabParallelHead,
    "sequence": SequenceParallel,
    "sequence_local": lambda: SequenceParallel(use_local_output=True),
    "heads": lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    "position_embedding": PositionEmbedding,
    "gather_sequence": GatherSequence,
    "gather_local_sequence": GatherLocalSequence,
    "local_sequence": LocalSequence,
    "colwise": ColwiseParallel,
    "colwise_local": ColwiseLocal,
    "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    "rowwise_sequence_bias": RowwiseWithBias,
}
"""The styles that the plan of a model family may name."""


def apply_tensor_parallel(model: nn.Module, spec: ParallelSpec, mesh: DeviceMesh) -> None:
    """Applies the plan without communication; shared parameters stay shared."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module, name, parameter in parameter_owners(model):
        owners.setdefault(id(parameter), []).append((module, name))
    for pattern, style in spec.tp_plan().items():
        for module in require_modules(model, (pattern,)):
            parallelize_with_factors(module, mesh, style)
    for (first, name), *others in owners.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def require_tp_plan(model: nn.Module, spec: ParallelSpec, degree: int) -> None:
    """Raises a ConfigError for a plan that cannot be applied: a missing module, a dimension or a number of attention
    heads that the degree does not divide, or a tied weight that its modules shard differently.
    """
    names = {id(module): name for name, module in model.named_modules()}
    dims: dict[int, set[int | None]] = {}
    sharded: set[tuple[int, str]] = set()
    for pattern, style in spec.tp_plan().items():
        for module in require_modules(model, (pattern,)):
            name = names[id(module)]
            heads = getattr(style, "heads", degree)
            if heads % degree:
                raise ConfigError(
                    f"layout.tensor = {degree} does not divide the {heads} attention heads of {name}",
                    f"expected a divisor of {heads}",
                )
            for parameter_name, dim in sharded_dims(style, module).items():
                parameter = getattr(module, parameter_name, None)
                if parameter is None:
                    continue
                sharded.add((id(module), parameter_name))
                dims.setdefault(id(parameter), set()).add(dim)
                if dim is not None and parameter.shape[dim] % degree:
                    raise ConfigError(
                        f"layout.tensor = {degree} does not divide dimension {dim} of {name}.{parameter_name}, "
                        f"which is {parameter.shape[dim]}",
                        "try another layout.tensor, or a plan without this module",
                    )
    for module, parameter_name, parameter in parameter_owners(model):
        if id(parameter) in dims and (id(module), parameter_name) not in sharded:
            dims[id(parameter)].add(None)
        if len(dims.get(id(parameter), ())) > 1:
            raise ConfigError(
                f"{names[id(module)]}.{parameter_name} is tied to another parameter, and the "
                "tensor-parallel plan shards them differently",
                "expected the same sharded dimension for all modules with this weight",
            )


def sharded_dims(style: ParallelStyle, module: nn.Module) -> dict[str, int | None]:
    """Parameter -> the dimension that a style shards, None where it is replicated. Styles of the user's own are not
    known.
    """
    if isinstance(style, LocalStyle):
        return {name: p.dim if isinstance(p, Shard) else None for name, p in style.placements.items()}
    embedding = isinstance(module, nn.Embedding)
    if isinstance(style, (ColwiseParallel, ColwiseLocal)):
        return {"weight": 1} if embedding else {"weight": 0, "bias": 0}
    if isinstance(style, (RowwiseParallel, RowwiseWithBias)):
        return {"weight": 0} if embedding else {"weight": 1, "bias": None}
    return {}


def shards_sequence(spec: ParallelSpec) -> bool:
    """Whether the hidden states between blocks are sharded over the sequence, so that norms have torch's
    SequenceParallel style.
    """
    styles = (style for style in spec.tp_plan().values() if isinstance(style, SequenceParallel))
    return any(placement.is_shard(SEQUENCE) for style in styles for placement in style.sequence_sharding)


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """All-reduces gradients that are partial sums over the tensor axis, in one collective in float32 at least: those
    of norms, which process a chunk of the sequence on each rank. DTensor leaves them partial after backward.
    """
    partial_gradients = [
        (p, p.grad)
        for p in parameters
        if isinstance(p.grad, DTensor) and any(placement.is_partial() for placement in p.grad.placements)
    ]
    if not partial_gradients:
        return
    flat = torch.cat([gradient.to_local().reshape(-1) for _, gradient in partial_gradients])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    dist.all_reduce(flat, group=mesh.get_group())
    sums = flat.split([gradient.numel() for _, gradient in partial_gradients])
    for (parameter, gradient), total in zip(partial_gradients, sums, strict=True):
        assert isinstance(parameter, DTensor)
        total = total.view(gradient.shape).to(gradient.dtype)
        parameter.grad = DTensor.from_local(total, mesh, parameter.placements, run_check=False)


def family_parallel_spec(spec: ModelSpec) -> ParallelSpec:
    """The ParallelSpec of a model of a family."""
    return ParallelSpec(
        blocks=spec.block_pattern,
        before=spec.before,
        after=spec.after,
        tp_plan=lambda: {name: STYLES[style]() for name, style in spec.tp_plan.items()},
        experts=next((pattern_of(p.name) for p in spec.parameters if p.is_expert_weight), ""),
        attention=spec.attention,
    )


def pattern_of(parameter: str) -> str:
    """Returns `blocks.*.experts` for `blocks.3.experts.weight`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", parameter.rpartition(".")[0])
