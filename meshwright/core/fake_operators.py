"""What torch's operators and classes do on fake tensors, where torch itself is wrong or slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RunOperator = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator on its arguments and keyword arguments."""


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether a tensor subclass contains other tensors, as DTensor does."""
    return hasattr(kind, "__tensor_flatten__")


def has_wrappers(types: Any) -> bool:
    """Whether an operator's arguments contain tensor subclasses such as DTensor.

    A mode is called before they are. If it returns NotImplemented, they unwrap themselves with the mode still active,
    and the operators on their local tensors, collectives included, reach the mode.
    """
    return any(map(is_wrapper, types))


def run_fake_operator(run: RunOperator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator by `run`, unless it is one that torch gets wrong on fake tensors.

    The result of a functional collective has the storage that the collective wrote to; fake tensors would allocate
    another one for wait_tensor. grouped_mm has a shape in every dtype; torch's fake kernel knows bf16 only. A condition
    on values is taken for true: models ask whether all of a mask is set, and then run without the mask.
    """
    name = corrected_operator(func)
    if name == "wait_tensor":
        return args[0]
    if name == "_grouped_mm":
        return fake_grouped_mm(*args, **kwargs)
    if name == "_local_scalar_dense" and args[0].dtype == torch.bool:
        return True
    return run(func, args, kwargs)


CORRECTED_OPERATORS = {
    ("_c10d_functional", "wait_tensor"): "wait_tensor",
    ("_c10d_functional", "_wrap_tensor_autograd"): "wait_tensor",
    ("aten", "_grouped_mm"): "_grouped_mm",
    ("aten", "_local_scalar_dense"): "_local_scalar_dense",
}


@cache
def corrected_operator(func: Any) -> str | None:
    """The name by which `run_fake_operator` knows an operator; None: torch gets it right."""
    return CORRECTED_OPERATORS.get((getattr(func, "namespace", ""), func.__name__.partition(".")[0]))


def fake_grouped_mm(a: Tensor, b: Tensor, offs: Tensor, **_kwargs: Any) -> Tensor:
    """2D x 3D: rows times one matrix per group; 2D x 2D: one product per group of rows."""
    if a.ndim == b.ndim:
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    return a.new_empty(a.shape[-2], b.shape[-1])


class LazyChunks:
    """The chunks of a parameter, created on access. FSDP2 reads its own and the first one; with thousands of ranks,
    creating all of them takes minutes.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.chunk_size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        size = self.tensor.size(self.dim)
        start = min(index * self.chunk_size, size)
        if start == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.chunk_size, size - start))


class PendingP2P:
    """A point-to-point transfer that keeps the tensors it sends alive until it is waited for, as a real one does."""

    def __init__(self, work: dist.Work, ops: list[dist.P2POp]) -> None:
        self.work, self.sent_tensors = work, [op.tensor for op in ops]

    def wait(self) -> None:
        self.work.wait()


def keep_sent_tensors(send: Any) -> Any:
    return lambda ops, *args, **kwargs: [PendingP2P(work, ops) for work in send(ops, *args, **kwargs)]
