"""Tensor and sequence parallelism: matrices cut by DTensor, the sequence cut between them, the vocabulary in the loss.

A block's first matrices are cut by columns and its last by rows. Going in, the pieces of the sequence are gathered once
for all of q, k and v (once for gate and up); coming out, the partial sums are added and scattered over the sequence in
one collective. So everything between the matrices, norms and residuals, works on a piece of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.config import ModelConfig
from meshwright.parallel.parallel_spec import ParallelSpec, parameter_owners, require_modules

SEQUENCE = 1
"""The dimension of the sequence in (batch, sequence, width)."""


class VocabParallelEmbedding(ParallelStyle):
    """Each rank looks up the tokens of its own rows; the sum over ranks is scattered over the sequence."""

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
        foreign = (index < 0) | (index >= len(rows))
        found = F.embedding(index.masked_fill(foreign, 0), rows).masked_fill(foreign[..., None], 0.0)
        whole = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE)]).to_local()


class GatherSequence(ParallelStyle):
    """A module whose first input comes in pieces of the sequence, and is gathered once for everything inside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self.gather, device_mesh))
        return module

    @staticmethod
    def gather(mesh: DeviceMesh, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
        if torch.is_autocast_enabled(hidden.device.type):  # what comes next computes in it: half the bytes
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return hidden.redistribute(placements=[Replicate()]), *rest


class LocalSequence(ParallelStyle):
    """A module that works on a rank's own piece of the sequence, token by token."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        module.register_forward_pre_hook(self.to_local)
        return module

    @staticmethod
    def to_local(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden, *rest


class VocabParallelHead(GatherSequence):
    """The head and its loss: each rank has its part of the vocabulary, all of the sequence, and comes to the whole
    loss.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard_rows(module, device_mesh)
        module.register_forward_hook(self.to_local_loss)
        return super()._apply(module, device_mesh)

    @staticmethod
    def to_local_loss(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = outputs
        return total.to_local() if isinstance(total, DTensor) else total, count


def shard_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        rows = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(rows, parameter.requires_grad))


def decoder_tp_plan(model: ModelConfig) -> Mapping[str, ParallelStyle]:
    """How the decoder is cut. Of experts only those that every token visits are: the others take the tokens of a rank's
    own piece of the sequence.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(SEQUENCE))
    block = "decoder.blocks.*"
    dense = [f"{block}.ffn"] if not model.experts else [f"{block}.ffn.shared"] if model.experts_shared else []
    return {
        "decoder.embedding": VocabParallelEmbedding(),
        f"{block}.attention_norm": SequenceParallel(),
        f"{block}.attention": GatherSequence(),
        **{f"{block}.attention.{name}": columns for name in ("q", "k", "v")},
        f"{block}.attention.out": rows,
        f"{block}.ffn_norm": SequenceParallel(),
        **({f"{block}.ffn": LocalSequence()} if model.experts else {}),
        **dict.fromkeys(dense, GatherSequence()),
        **{f"{ffn}.{name}": columns for ffn in dense for name in ("gate", "up")},
        **{f"{ffn}.down": rows for ffn in dense},
        "decoder.norm": SequenceParallel(),
        "head": VocabParallelHead(),
    }


def apply_tensor_parallel(model: nn.Module, parts: ParallelSpec, mesh: DeviceMesh) -> None:
    """Cuts the matrices, each rank from its own copy, and keeps shared ones shared."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module, name, parameter in parameter_owners(model):
        owners.setdefault(id(parameter), []).append((module, name))
    cuts = dict(parts.tp_plan())
    require_modules(model, tuple(cuts))  # torch would only warn of one that is not there
    parallelize_module(model, mesh, cuts, src_data_rank=None)
    for (first, name), *others in owners.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Adds up gradients of which each rank has a part: those of norms, which saw a piece of the sequence each. DTensor
    leaves them so after backward, and whoever reads the local tensor has a wrong one. One collective for all.
    """
    parts = [
        (p, p.grad)
        for p in parameters
        if isinstance(p.grad, DTensor) and any(placement.is_partial() for placement in p.grad.placements)
    ]
    if not parts:
        return
    flat = torch.cat([gradient.to_local().reshape(-1) for _, gradient in parts])
    dist.all_reduce(flat, group=mesh.get_group())
    for (parameter, gradient), whole in zip(parts, flat.split([g.numel() for _, g in parts]), strict=True):
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(whole.view(gradient.shape), mesh, parameter.placements, run_check=False)


def decoder_parallel_spec(model: ModelConfig) -> ParallelSpec:
    """What a layout must know of our own decoder."""
    ends = (("decoder.embedding",), ("decoder.norm", "head"))
    return ParallelSpec(blocks="decoder.blocks.*", outer_modules=ends, tp_plan=partial(decoder_tp_plan, model))
