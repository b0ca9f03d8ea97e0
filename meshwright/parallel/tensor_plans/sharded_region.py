"""Finds the parameters that work on shards of activations although no row of a tensor-parallel plan names them.

Between a layer that is sharded by outputs and the next one that is sharded by inputs, every rank has a shard of the
activations. The gradient of a replicated parameter that is used there, such as that of a learned activation function,
is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.models.trace import copy_to_meta
from meshwright.torch_private import FakeTensors


def parameters_in_sharded_region(
    model: nn.Module,
    sharded: Iterable[nn.Module],
    summed: Iterable[nn.Module],
    run: Callable[[nn.Module], Any],
) -> set[str]:
    """The names of the parameters that are used together with shards, inside of `model`.

    `sharded` are modules whose outputs are shards, `summed` those whose outputs are replicated again. `run` runs the
    forward of a copy of the model on the meta device.
    """
    names = {id(module): name for name, module in model.named_modules()}
    copied = copy_to_meta(model)
    region = ShardedRegion(copied)
    for module in sharded:
        copied.get_submodule(names[id(module)]).register_forward_hook(lambda *call: region.add(call[-1]))
    for module in summed:
        copied.get_submodule(names[id(module)]).register_forward_hook(lambda *call: region.discard(call[-1]))
    with torch.no_grad(), FakeTensors().active(), region:
        run(copied)
    return region.used


class ShardedRegion(TorchFunctionMode):
    """Follows shards through the functions of torch: a result of a shard is a shard."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {id(p): {name} for name, p in model.named_parameters()}
        self.shards: dict[int, Tensor] = {}
        self.kept_alive: list[Tensor] = []
        """a tensor that is freed would leave its id to another one"""
        self.used: set[str] = set()

    def add(self, output: Any) -> None:
        self.shards.update({id(tensor): tensor for tensor in tensors_of(output)})

    def discard(self, output: Any) -> None:
        for tensor in tensors_of(output):
            self.shards.pop(id(tensor), None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = list(tensors_of((*args, *(kwargs or {}).values())))
        outputs = list(tensors_of(result))
        self.kept_alive += outputs
        names = [self.parameters[id(tensor)] for tensor in inputs if id(tensor) in self.parameters]
        if any(id(tensor) in self.shards for tensor in inputs):
            self.used.update(*names)
            self.add(outputs)
        elif len(names) == len(inputs) and names:  # a cast or a view of parameters
            self.parameters.update({id(tensor): set().union(*names) for tensor in outputs})
        return result


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
