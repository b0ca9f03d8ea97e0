"""A cache of what operators return on fake tensors: a step calls the same few operators on the same shapes many times.

Torch's own cache of fake tensors takes longer to compute a key than the operator takes on real tensors. This one
computes its keys from sizes, strides and dtypes, and knows three kinds of results: an argument, a view of an argument,
and a new tensor. An operator whose result is none of them, or depends on values, is run every time. The results are
kept for all simulations of a process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from meshwright.core.fake_operators import run_operator
from meshwright.core.torch_private import FakeTensors, OpOverload, storage_id


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a result: the argument with this number, a view of it, or a new tensor."""

    argument: int | None
    is_view: bool = False
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: Any = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CachedResult:
    """The tensors of a result, and whether they are a single tensor, a list or a tuple; a tensor may be missing."""

    kind: type
    tensors: tuple[CachedTensor | None, ...]


READS_NO_DATA = (
    "c10d::send",
    "c10d::recv_",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit._RecordFunction",
)


class Uncached(Exception):
    """A call of an operator that is not cached."""


class OperatorCache:
    """Runs operators on fake tensors."""

    def __init__(self, fake: FakeTensors) -> None:
        self.fake = fake

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = results_of(func)
        if results is None:
            return (self.fake.run_kernel if reads_no_data(func) else run_operator)(func, args, kwargs)
        tensors: list[Tensor] = []
        try:
            key = (
                torch.get_default_dtype(),
                self.describe(args, tensors),
                (*kwargs, self.describe(kwargs.values(), tensors)) if kwargs else (),
            )
            cached = results.get(key)
        except (Uncached, TypeError):  # a TypeError: an argument that is not hashable
            return func(*args, **kwargs)
        if cached is not None:
            return self.build(cached, tensors)
        result = func(*args, **kwargs)
        if key not in results:
            results[key] = self.record(result, tensors, func.is_view)
        return result

    def describe(self, values: Iterable[Any], tensors: list[Tensor]) -> tuple[Hashable, ...]:
        """What a result depends on in these arguments; `tensors` collects the tensors."""
        keys: list[Hashable] = []
        for value in values:
            kind = type(value)
            if kind is self.fake.tensor_class:
                if value.constant is not None or value.fake_mode is not self.fake.mode or value.is_complex():
                    raise Uncached
                tensors.append(value)
                keys.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
            elif isinstance(value, Tensor):
                raise Uncached
            elif isinstance(value, list | tuple):
                keys.append((kind, self.describe(value, tensors)))
            else:
                keys.append((kind, value))
        return tuple(keys)

    def record(self, result: Any, tensors: list[Tensor], is_view: bool) -> CachedResult | None:
        """A result as the cache keeps it; None: it is of another kind, or shares no storage with an argument although
        the operator returns views.
        """
        kind = type(result) if isinstance(result, list | tuple) else Tensor
        results = result if isinstance(result, list | tuple) else [result]
        cached = tuple(None if tensor is None else self.record_tensor(tensor, tensors) for tensor in results)
        if any(tensor is None for tensor, found in zip(cached, results, strict=True) if found is not None):
            return None
        if is_view and any(tensor is not None and tensor.argument is None for tensor in cached):
            return None
        return CachedResult(kind, cached)

    def record_tensor(self, result: Any, tensors: list[Tensor]) -> CachedTensor | None:
        for index, argument in enumerate(tensors):
            if result is argument:
                return CachedTensor(index)
        if not isinstance(result, self.fake.tensor_class) or result.constant is not None or result.requires_grad:
            return None
        size, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
        tensor = partial(
            CachedTensor, size=size, stride=stride, dtype=result.dtype, device=result.fake_device, offset=offset
        )
        viewed = [index for index, argument in enumerate(tensors) if storage_id(argument) == storage_id(result)]
        if viewed:
            return tensor(0, is_view=True) if len(tensors) == 1 else None
        extent = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if all(size) else 0
        if offset or result.is_complex() or result.untyped_storage().nbytes() != extent * result.element_size():
            return None
        return tensor(None)

    def build(self, cached: CachedResult, tensors: list[Tensor]) -> Any:
        results = [None if tensor is None else self.build_tensor(tensor, tensors) for tensor in cached.tensors]
        return results[0] if cached.kind is Tensor else cached.kind(results)

    def build_tensor(self, tensor: CachedTensor, tensors: list[Tensor]) -> Tensor:
        if tensor.argument is None:
            return self.fake.new(tensor.size, tensor.stride, tensor.dtype, tensor.device, None, 0)
        argument = tensors[tensor.argument]
        if not tensor.is_view:
            return argument
        return self.fake.new(tensor.size, tensor.stride, tensor.dtype, tensor.device, argument, tensor.offset)


@cache
def results_of(func: Any) -> dict[Hashable, CachedResult | None] | None:
    """The results of an operator by its arguments, which an `OperatorCache` fills; None: they are not cached."""
    return {} if depends_on_shapes(func) else None


@cache
def reads_no_data(func: Any) -> bool:
    """Whether an operator is a message to another rank, which does not exist, or a mark of the profiler. Torch's fake
    tensors spend a millisecond on each. Other collectives of the fake process group copy a rank's own part.
    """
    return isinstance(func, OpOverload) and func.name() in READS_NO_DATA


def depends_on_shapes(func: Any) -> bool:
    """Whether an operator is one of torch's whose result depends on nothing but the shapes of its arguments, and that
    changes neither the shape nor the storage of one.
    """
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "_c10d_functional"):
        return False
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    name = func.name().partition("::")[2].partition(".")[0]
    return not any(tag in func.tags for tag in tags) and name not in ("resize_", "set_", "lift", "lift_fresh")
