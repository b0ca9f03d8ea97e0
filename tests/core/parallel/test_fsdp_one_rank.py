"""FSDP2 over a shard group of one rank: gradients are those of the model alone, and are not copied to be reduced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.parallel.data_parallel.fsdp import InPlaceReduceScatter, reduce_in_place
from meshwright.testing import run_ranks


class CopiesToOtherMemory(TorchDispatchMode):
    """Counts copies of vectors with this many elements; torch does not copy a tensor to itself."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[0].shape == args[1].shape == (self.elements,):
            self.count += args[0].data_ptr() != args[1].data_ptr()
        return function(*args, **(kwargs or {}))


def gradients_and_copies(mesh, in_place: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    elements = sum(parameter.numel() for parameter in model.parameters())
    if mesh is not None:
        fully_shard(model, mesh=mesh)
        if in_place:
            reduce_in_place(model, mesh)
    with CopiesToOtherMemory(elements) as copies:
        for _ in range(2):  # the second gradient is added to the first
            model(torch.ones(3, 6)).square().sum().backward()
    gradients = [p.grad.to_local() if mesh is not None else p.grad for p in model.parameters()]
    return gradients, copies.count


def gradients_with_and_without_copies(_world):
    """On one rank, which `run_ranks` gives no process group: FSDP2 would keep the group in the process of the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    return [gradients_and_copies(mesh, in_place) for in_place in (False, True)]


def test_gradients_of_one_rank_are_reduced_in_place():
    plain, _ = gradients_and_copies(None, in_place=False)
    [[(copied, copies), (reduced, in_place)]] = run_ranks(gradients_with_and_without_copies, 1)
    assert (copies, in_place) == (2, 0)
    for a, b, c in zip(plain, copied, reduced, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_input_and_output_of_a_reduction_are_one_tensor():
    reduce_scatter = InPlaceReduceScatter()
    first, output, second = (
        reduce_scatter.allocate((8,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(3)
    )
    assert first is output
    assert second is not first


def test_input_of_a_backward_that_raised_is_dropped_by_the_next_one():
    reduce_scatter, allocated = InPlaceReduceScatter(), []

    def backward(calls: int, fails: bool) -> None:
        """Allocates in a hook of a backward, which may raise between input and output."""

        def hook(_gradient: torch.Tensor) -> None:
            for _ in range(calls):
                allocated.append(reduce_scatter.allocate((8,), dtype=torch.float32, device=torch.device("cpu")))
            if fails:
                raise RuntimeError("out of memory")

        x = torch.ones(3, requires_grad=True)
        x.register_hook(hook)
        x.sum().backward()

    with pytest.raises(RuntimeError, match="out of memory"):
        backward(1, fails=True)
    backward(2, fails=False)
    lost, first, output = allocated
    assert first is output
    assert first is not lost
