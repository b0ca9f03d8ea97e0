"""Tensor-parallel styles that run a module's own forward on the local shards of its parameters.

They serve any module of which the weights are sharded by rows or columns, whatever its class. Activations outside of
the sharded modules are replicated: every rank has all of them, and computes the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.parallel.tensor_plans.collectives import enter_shards, gather_shards, split_to_shards, sum_shards


class LocalStyle(ParallelStyle):
    """Shards the direct parameters of a module by `placements`, without communication. Parameters that are not named
    stay as they are.
    """

    transposed = False
    """whether the weight is (inputs, outputs), as in the Conv1D of transformers, and not (outputs, inputs)"""

    def __init__(self, placements: Mapping[str, Placement], partial_gradients: bool = False) -> None:
        self.placements, self.partial_gradients = dict(placements), partial_gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            if (parameter := module._parameters.get(name)) is not None:
                sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        forward = partial(transposed_linear, module) if self.transposed else module.forward
        module.forward = partial(self.run, module, forward, device_mesh.get_group())
        return module

    def run(
        self, module: nn.Module, forward: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the module's own forward; its first argument enters the sharded region."""
        if args:
            args = (self.enter(args[0], group), *args[1:])
        else:
            first = next(iter(kwargs))
            kwargs = kwargs | {first: self.enter(kwargs[first], group)}
        with self.local_parameters(module):
            result = forward(*args, **kwargs)
        return self.leave(module, result, group)

    def enter(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG002
        return x

    def leave(self, module: nn.Module, result: Any, group: dist.ProcessGroup) -> Any:  # noqa: ARG002
        return result

    @contextmanager
    def local_parameters(self, module: nn.Module) -> Iterator[None]:
        """The parameters of the module are local tensors inside, with their autograd graph."""
        parameters = dict(module._parameters)
        for name in self.placements:
            if parameters.get(name) is not None:
                module._parameters[name] = self.local(parameters[name])  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(parameters)

    def local(self, parameter: Tensor | None) -> Tensor:
        """The local shard; the gradient of a replicated parameter is a partial sum where it sees a shard only."""
        assert isinstance(parameter, DTensor)
        replicated = Partial() if self.partial_gradients else Replicate()
        return parameter.to_local(grad_placements=[replicated if p.is_replicate() else p for p in parameter.placements])


def transposed_linear(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.t(), module.bias)  # type: ignore[operator,arg-type]


class Colwise(LocalStyle):
    """A linear layer sharded by outputs: `gather` makes its output replicated, else it is a local shard."""

    def __init__(self, gather: bool = False, heads: int = 0, transposed: bool = False) -> None:
        super().__init__({"weight": Shard(1 if transposed else 0), "bias": Shard(0)})
        self.gather, self.transposed = gather, transposed
        self.heads = heads
        """the attention heads of the output, of which each rank has whole ones; 0 if it has none"""

    def enter(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return enter_shards(x, group)

    def leave(self, module: nn.Module, result: Any, group: dist.ProcessGroup) -> Any:  # noqa: ARG002
        return gather_shards(result, group) if self.gather else result


class Rowwise(LocalStyle):
    """A linear layer sharded by inputs: the sum over ranks is replicated, and the bias is added once, to the sum.
    `split` takes this rank's shard of a replicated input, else the input is a local shard.
    """

    def __init__(self, split: bool = False, transposed: bool = False) -> None:
        super().__init__({"weight": Shard(0 if transposed else 1), "bias": Replicate()})
        self.split, self.transposed = split, transposed

    def enter(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return split_to_shards(x, group) if self.split else x

    @contextmanager
    def local_parameters(self, module: nn.Module) -> Iterator[None]:
        with super().local_parameters(module):
            if "bias" in module._parameters:
                module._parameters["bias"] = None
            yield

    def leave(self, module: nn.Module, result: Any, group: dist.ProcessGroup) -> Any:
        total = sum_shards(result, group)
        bias = module._parameters.get("bias")
        return total if bias is None else total + self.local(bias)


class VocabEmbedding(LocalStyle):
    """An embedding sharded by rows: each rank looks up the tokens of its rows, and the sum over ranks is replicated.

    The module's own forward may scale what it looks up.
    """

    def __init__(self) -> None:
        super().__init__({"weight": Shard(0)})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        rows = module.num_embeddings // device_mesh.size()
        if module.padding_idx is not None:  # the row without a gradient is on one rank only
            local_index = module.padding_idx - rows * device_mesh.get_local_rank()
            module.padding_idx = local_index if 0 <= local_index < rows else None
        return super()._apply(module, device_mesh)

    def run(
        self, module: nn.Module, forward: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        (tokens,) = (*args, *kwargs.values())
        rows = self.local(module._parameters["weight"]).shape[0]
        index = tokens - rows * group.rank()
        elsewhere = (index < 0) | (index >= rows)
        with self.local_parameters(module):
            local_rows = forward(index.masked_fill(elsewhere, 0))
        return sum_shards(local_rows.masked_fill(elsewhere[..., None], 0.0), group)


class PartialGradients(LocalStyle):
    """Replicated parameters of a module that sees a shard of the activations, such as the norm of each attention head:
    their gradients are summed over the ranks (`reduce_partial_gradients`).
    """

    def __init__(self, *names: str) -> None:
        super().__init__(dict.fromkeys(names, Replicate()), partial_gradients=True)


class LatentKeys(LocalStyle):
    """The replicated projection of multi-head latent attention to (latent keys and values, rotary keys): all heads
    share its rotary part, so the gradients of that part are partial sums.
    """

    def __init__(self, rotary_width: int) -> None:
        super().__init__({})
        self.rotary_width = rotary_width

    def leave(self, module: nn.Module, result: Any, group: dist.ProcessGroup) -> Any:  # noqa: ARG002
        latent, rotary = result.split([result.shape[-1] - self.rotary_width, self.rotary_width], dim=-1)
        return torch.cat([latent, enter_shards(rotary, group)], dim=-1)


class SumOutput(LocalStyle):
    """A module whose result is a partial sum."""

    def __init__(self) -> None:
        super().__init__({})

    def leave(self, module: nn.Module, result: Any, group: dist.ProcessGroup) -> Any:  # noqa: ARG002
        return sum_shards(result, group)
