"""Finds the parameters that work on shards of activations although no row of a tensor-parallel plan names them.

Between a layer that is sharded by outputs and the next one that is sharded by inputs, every rank has a shard of the
activations. The gradient of a replicated parameter that is used there, such as that of a learned activation function,
is a partial sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.models.trace import copy_to_meta
from meshwright.core.torch_private import FakeTensors


def parameters_in_sharded_region(
    model: nn.Module, sharded: Iterable[str], summed: Iterable[str], passed: Iterable[str], inputs: dict[str, Any]
) -> set[str]:
    """The names of the parameters that are used together with shards in a forward on fake tensors.

    `sharded` are modules whose outputs are shards, `summed` those whose outputs are replicated again, and `passed`
    those that are not run, because what they do depends on values: they return their first argument.
    """
    copied = copy_to_meta(model)
    region = ShardedRegion(copied, inputs)
    for name in sharded:
        copied.get_submodule(name).register_forward_hook(lambda *call: region.add(call[-1]))
    for name in summed:
        copied.get_submodule(name).register_forward_hook(lambda *call: region.discard(call[-1]))
    for name in passed:
        copied.get_submodule(name).forward = lambda hidden, *_: hidden
    with torch.no_grad(), FakeTensors().active(), region:
        copied(**inputs)
    return region.used


class ShardedRegion(TorchFunctionMode):
    """Follows shards through the functions of torch: a result of a shard is a shard."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.parameters = {id(p): {name} for name, p in model.named_parameters()}
        """tensors that are computed from parameters alone, and the names of these"""
        self.activations = {id(tensor) for tensor in iter_tensors(list(inputs.values()))}
        self.shards: set[int] = set()
        self.kept_alive: list[Tensor] = []
        """a tensor that is freed would leave its id to another one"""
        self.used: set[str] = set()

    def add(self, output: Any) -> None:
        self.shards.update(id(tensor) for tensor in iter_tensors(output))

    def discard(self, output: Any) -> None:
        self.shards.difference_update(id(tensor) for tensor in iter_tensors(output))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {id(tensor) for tensor in iter_tensors((*args, *(kwargs or {}).values()))}
        outputs = list(iter_tensors(result))
        self.kept_alive += outputs
        names = set().union(*(self.parameters[tensor] for tensor in inputs if tensor in self.parameters))
        if inputs & self.shards:
            self.used |= names
            self.add(outputs)
        elif inputs & self.activations:
            self.activations.update(id(tensor) for tensor in outputs)
        elif names:
            self.parameters.update({id(tensor): names for tensor in outputs})
        return result


def iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)
