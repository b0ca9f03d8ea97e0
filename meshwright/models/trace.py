"""Traces any module on fake tensors: its parameters, and the FLOPs and memory of each of its blocks."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_to_meta(module: ModuleT) -> ModuleT:
    """Returns a copy of a module whose parameters and buffers are on the meta device; tied weights stay tied."""
    memo: dict[int, Tensor] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)
