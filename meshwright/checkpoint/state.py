"""The tensors of a run by what they are (parameter, buffer, optimizer's), never by rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.checkpoint.tensors import digest_of_lines, tensor_line

State = dict[str, Tensor]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Every tensor that a resumed run needs, under a name that no layout changes."""
    state: State = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    kept = model.state_dict(keep_vars=True)
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name in kept}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return state


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def content(tensor: Tensor) -> memoryview:
    """A host tensor's bytes, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


@torch.no_grad()
def parameters_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of every parameter's name, shape and bytes."""
    return digest_of_lines(tensor_line(n, dtype_name(p), p.shape, content(p.cpu())) for n, p in named)
