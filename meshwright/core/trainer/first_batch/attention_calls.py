"""The calls of scaled_dot_product_attention in a forward pass, and the time that each backend of it takes for them."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from meshwright.core.parallel.parallel_model import Autocast
from meshwright.core.torch_private import is_fake

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The values of `kernels.attention`; those that come first are preferred where the chosen one does not apply."""
MEASURED = ("cudnn", "flash", "efficient")
MAX_CALLS = 4
"""Different calls of a forward pass that are measured, the most frequent first."""
WARMUP, REPEATS = 2, 5


class AttentionCalls(TorchFunctionMode):
    """Counts the different calls of scaled_dot_product_attention while it is active, without those on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.arguments: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not is_fake(args[0] if args else kwargs["query"]):
            key = tuple(describe(value) for value in (*args, *kwargs, *kwargs.values()))
            self.counts[key] += 1
            self.arguments.setdefault(key, (args, kwargs))
        return func(*args, **kwargs)

    def time(self, backend: str, autocast: Autocast) -> float | None:
        """The milliseconds of forward and backward of all calls by one backend; None if it supports not all of them."""
        total = 0.0
        for key, count in self.counts.most_common(MAX_CALLS):
            args, kwargs = self.arguments[key]
            args, kwargs = tuple(map(fresh, args)), {name: fresh(value) for name, value in kwargs.items()}
            try:
                with warnings.catch_warnings(), sdpa_kernel([BACKENDS[backend]]), autocast():
                    warnings.simplefilter("ignore")  # torch warns of every reason why a kernel does not apply
                    total += count * time_call(args, kwargs)
            except RuntimeError:  # no kernel of this backend supports the arguments
                return None
        return total


def describe(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def fresh(value: Any) -> Any:
    """A tensor of the same layout for another forward pass; masks and numbers are taken as they are."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).normal_()


def time_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The milliseconds of one forward and backward pass of a call."""
    with torch.enable_grad():
        inputs = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()
        ]
        for tensor in inputs:
            tensor.requires_grad_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for repeat in range(WARMUP + REPEATS):
            if repeat == WARMUP:
                events[0].record()
            output = F.scaled_dot_product_attention(*args, **kwargs)
            torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
        events[1].record()
        events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / REPEATS
