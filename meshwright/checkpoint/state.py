"""The tensors of a run by what they are (parameter, buffer, optimizer's), never by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.checkpoint.tensors import digest_of_lines, tensor_line
from meshwright.parallel.blocks import Block, block_of, whole_of

State = dict[str, Tensor | Block]
"""Name -> a whole tensor, or this rank's block of one."""


def tensors_of(model: nn.Module, moments: Mapping[str, Block]) -> State:
    """Every tensor that a resumed run needs, under a name that no layout changes. `moments` are the optimizer's, as
    parameter name / key.
    """
    state: State = {f"model/{name}": block_of(parameter) for name, parameter in model.named_parameters()}
    kept = model.state_dict(keep_vars=True)
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name in kept}
    return state | {f"optimizer/{name}": block for name, block in moments.items()}


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def content(tensor: Tensor) -> memoryview:
    """A host tensor's bytes, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


@torch.no_grad()
def parameters_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of every parameter's name, shape and bytes; ranks that hold blocks of one must all ask."""
    return digest_of_lines(tensor_line(n, dtype_name(p), p.shape, content(whole_of(p).cpu())) for n, p in named)
