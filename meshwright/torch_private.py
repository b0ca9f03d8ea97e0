"""Torch's private names, all in this file: what FSDP2 holds, how stages first meet, and tensors without content."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils._python_dispatch import TorchDispatchMode


def fsdp_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's shard and gathered form, and the gradients that FSDP keeps out of `.grad`. A gathered parameter
    keeps its storage for ever and is freed by resizing it to nothing, so it may be named while it is empty.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # older releases have at most one group a module
        for group in filter(None, state._fsdp_param_groups if several else [state._fsdp_param_group]):
            if group._partial_reduce_output is not None:
                yield "gradient", group._partial_reduce_output
            for held in group.fsdp_params:
                yield "parameter", held.sharded_param
                yield from (("parameter", tensor) for tensor in held.all_gather_outputs)
                for name in ("_sharded_post_forward_param_data", "_unsharded_param"):
                    if getattr(held, name, None) is not None:
                        yield "parameter", getattr(held, name)
                if held.unsharded_accumulated_grad is not None:
                    yield "gradient", held.unsharded_accumulated_grad


class StageWithFilteredP2P(PipelineStage):
    """Before the first step torch sends a word to each neighbour, in older releases also to itself, where a V turns
    round: Gloo has no such pair. Newer ones ask all stages whether their shapes are known; ours always are, and where
    no other stage exists none is asked.
    """

    def receive_buffers(self) -> Iterator[Tensor]:
        """What messages of neighbours come into. Torch makes one for every micro-batch, once, and keeps all of them."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in (info for each in infos.values() for info in each):
                buffer = getattr(info, "buffer", None)
                if isinstance(buffer, Tensor):
                    yield buffer

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _warmup_forward_vote(self, *args: Any, **words: Any) -> Tensor:
        return yes() if uses_fake_backend() else super()._warmup_forward_vote(*args, **words)

    def _warmup_backward_result(self, *args: Any, **words: Any) -> Tensor:
        return yes() if uses_fake_backend() else super()._warmup_backward_result(*args, **words)


def uses_fake_backend() -> bool:
    """Whether the ranks of the process group are imagined."""
    return dist.get_backend() == "fake"


def yes() -> Tensor:
    return torch.tensor([1], dtype=torch.int32)


def init_fake_process_group(rank: int, ranks: int) -> None:
    """A process group of so many ranks, of which this process is one and the others do not exist: every collective
    ends at once and changes nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def clear_dtensor_cache() -> None:
    """DTensor remembers by which groups a mesh sends, also of one that is gone and had the same shape."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


class FakeTensors:
    """Tensors with shapes and without content. They are made inside `with imagined.active():`, and may be worked with
    outside, too.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self.mode, FakeCollectives():  # type: ignore[no-untyped-call]
            yield


class FakeCollectives(TorchDispatchMode):
    """What a collective gives is there at once, in the memory that it was sent to; without content torch would give
    other memory to whoever waits for it. And grouped products have shapes in every precision; torch knows those of
    bf16 alone.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = getattr(func, "namespace", ""), func.__name__.partition(".")[0]
        if namespace == "_c10d_functional" and name in ("wait_tensor", "_wrap_tensor_autograd"):
            return args[0]
        if namespace == "aten" and name == "_grouped_mm":
            return fake_grouped_mm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fake_grouped_mm(one: Tensor, other: Tensor, offs: Tensor, **_words: Any) -> Tensor:
    """Rows by one matrix a group; or, of both by rows, one product a group."""
    if one.ndim == other.ndim:
        return one.new_empty(len(offs), one.shape[0], other.shape[1])
    return one.new_empty(one.shape[-2], other.shape[-1])


class LazyChunks:
    """A parameter's pieces, of which FSDP2 looks at its own and the first; with thousands of ranks it would spend
    minutes on making all of them.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.chunk_size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, place: int) -> Tensor:
        size = self.tensor.size(self.dim)
        start = min(place * self.chunk_size, size)
        if start == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.chunk_size, size - start))


class PendingP2P:
    """Messages between stages: until somebody has waited for them they keep what they send."""

    def __init__(self, work: dist.Work, ops: list[dist.P2POp]) -> None:
        self.work, self.sent_tensors = work, [op.tensor for op in ops]

    def wait(self) -> None:
        self.work.wait()


def keep_sent_tensors(send: Any) -> Any:
    return lambda ops, *words, **named: [PendingP2P(work, ops) for work in send(ops, *words, **named)]


@contextmanager
def patched_for_simulation() -> Iterator[None]:
    """What torch does otherwise, or slowly, where nothing is computed or sent. DTensor takes tensors without content
    for a sign that something is compiled, and forgets what it has worked out before.
    """
    tracing = "_are_we_tracing"
    names = [name for name in sys.modules if name.startswith("torch.distributed")]
    changes: list[tuple[str, str, Any]] = [
        ("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty", LazyChunks),
        ("torch.distributed.pipelining.schedules", "_batch_p2p", keep_sent_tensors(schedules._batch_p2p)),
        *((name, tracing, lambda: False) for name in names if tracing in vars(sys.modules[name])),
    ]
    changed = [(sys.modules[name], attribute, to) for name, attribute, to in changes if name in sys.modules]
    before = [getattr(module, attribute) for module, attribute, _ in changed]
    for module, attribute, to in changed:
        setattr(module, attribute, to)
    try:
        yield
    finally:
        for (module, attribute, _), was in zip(changed, before, strict=True):
            setattr(module, attribute, was)


def scaled_mm(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiplies two float8 matrices, each with its scale, by the kernel that torch's float8 training uses."""
    return torch._scaled_mm(left, right, scale_a=scale_left, scale_b=scale_right, out_dtype=out_dtype)
