"""The parallelized model as the training step sees it: one forward and backward over all micro-batches of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.core.models.layers.experts import Router
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.parallel.mesh import Meshes
from meshwright.core.parallel.tensor_parallel import reduce_partial_gradients

ShardInputs = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
Autocast = Callable[[], AbstractContextManager[None]]


@dataclass
class GradientReduction:
    """What DDP's gradient all-reduce of one step sent, and the squared norm of the local gradient before it."""

    buckets: int = 0
    message_bytes: int = 0
    local_square: Tensor | None = None


@dataclass
class PassHooks:
    """What the step does between the passes of `ParallelModel.forward_backward`."""

    enter: Callable[[str], object]
    """called when a phase (forward, backward, sync) begins"""
    autocast: Autocast
    """the context of every forward pass"""
    scale_loss: Callable[[Tensor], Tensor]
    """maps the summed token losses of a micro-batch to the value that backward starts from"""
    losses_complete: Callable[[], None]
    """called before the last backward pass, where every rank has computed all of its losses by then"""


@dataclass
class InFlightTracker:
    """Counts the micro-batches whose activations a rank keeps while a pipeline schedule runs."""

    enter: Callable[[str], object] = lambda _phase: None
    """called when a phase begins; between passes a rank is in `sync`"""
    live: Counter[int] = field(default_factory=Counter)
    """micro-batches in flight, by stage"""
    peak: Counter[int] = field(default_factory=Counter)
    """the maximum of `live`, by stage"""
    peak_total: int = 0
    """the maximum over time of the sum over the rank's stages"""
    actions: list[tuple[int, int]] = field(default_factory=list)
    """the stage and micro-batch of every forward and backward pass, in order"""

    def begin(self, phase: str, stage: int, micro_batch: int) -> None:
        """Begins a pass of a stage."""
        self.actions.append((stage, micro_batch))
        self.enter(phase)

    def add(self, stage: int, change: int) -> None:
        self.live[stage] += change
        self.peak[stage] = max(self.peak[stage], self.live[stage])
        self.peak_total = max(self.peak_total, self.live.total())


def stateful_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yields the buffers that a forward pass may change, differently on each data-parallel rank. A router's bias is not
    one of them: the step updates it, identically on all ranks.
    """
    for child in module.modules():
        if not isinstance(child, Router):
            yield from child.buffers(recurse=False)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a checkpoint has. `state_dict` would reshard the parameters of FSDP2."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


KEPT = (int, float, Tensor)
"""What a forward pass may keep in an attribute of a module from one call to the next."""


@contextmanager
def unchanged_module(module: nn.Module) -> Iterator[None]:
    """Restores what forward passes that belong to no step change: buffers, the parameters that a user's forward
    changes, and the numbers and tensors that modules keep in attributes.
    """
    changed = getattr(module, "changed_in_forward", ())
    parameters = (p for name, p in module.named_parameters() if name.removeprefix("model.") in changed)
    tensors = [*module.buffers(), *parameters]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    attributes = [(child, dict(vars(child))) for child in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for child, before in attributes:
            for key, value in list(vars(child).items()):
                if isinstance(value, KEPT) and key not in before:
                    del vars(child)[key]
                elif isinstance(value, KEPT) and value is not before[key]:
                    vars(child)[key] = before[key]


def rounded_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that are the rounding of master weights."""
    return (p for p in module.parameters() if p.requires_grad and p.dtype == torch.bfloat16)


def router_biases(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the routers' biases, which must be equal on all ranks: no forward pass changes them."""
    for name, child in module.named_modules():
        if isinstance(child, Router):
            yield f"{name}.bias", child.bias


class ParallelModel:
    """A module after every mesh dimension was applied. When `forward_backward` returns, every gradient is the sum over
    the data-parallel ranks. This base class has no data parallelism; DDP, FSDP2 and pipelines are subclasses.
    """

    meshes = Meshes(None)
    context: ContextAttention | None = None
    """the attention of sequence chunks; None: this rank has full sequences"""
    has_loss = True
    """whether this rank computes a loss; in a pipeline only the rank of the last stage does"""
    stage_blocks: Mapping[int, range] = MappingProxyType({})
    """the blocks of every pipeline stage of this rank"""
    tied_copies: frozenset[str] = frozenset()
    """parameters that mirror a tied parameter of another stage; they are neither updated nor saved here"""
    masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    """the float32 master weights of the parameters that are their rounding; sharded like them"""
    block_patterns: tuple[str, ...] = ()
    """the names of the blocks, with `*` for their numbers"""
    name_prefix = ""
    """what the names of parameters begin with, and the user's names do not"""
    zero_in_place = False
    """whether gradients are zeroed in place: with accumulation, new ones would exist beside DDP's buckets"""
    micro_batches = 0
    """the number of micro-batches that gradients accumulate over"""
    interleaves_backward = False
    """whether backward passes start before the last forward pass"""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.groups: list[dist.ProcessGroup] = []
        """the data-parallel process groups, the outermost mesh dimension last"""
        self.on_last_bucket: Callable[[], object] = lambda: None
        """called when DDP hands over the last bucket, after which only communication is left"""
        self.shard_inputs: ShardInputs = lambda inputs: inputs
        """selects this rank's part of a micro-batch (its sequence chunk under context parallelism)"""

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass needs several ranks, so that no rank can run it alone."""
        return self.meshes.dense_mesh is not None or self.meshes.context_group is not None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank updates and saves, as they are between steps (local shards under FSDP2)."""
        return {name: p for name, p in self.module.named_parameters() if name not in self.tied_copies}

    def master_parameters(self) -> dict[str, Tensor]:
        """The parameters of the run, which checkpoints contain: the same, or the master weight where there is one."""
        return {name: self.masters.get(parameter, parameter) for name, parameter in self.parameters().items()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the parameters that have one, sharded like them."""
        return {name: parameter.grad for name, parameter in self.parameters().items() if parameter.grad is not None}

    @torch.no_grad()
    def round_masters(self) -> None:
        """Writes the master weights, rounded, to the model, after a checkpoint was loaded into them."""
        for parameter, master in self.masters.items():
            local_tensor(parameter).copy_(local_tensor(master))

    def broadcast_masters(self) -> None:
        """Copies the initial master weights of the first rank to its replicas, where their weights are copied (DDP)."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(*inputs)  # type: ignore[no-any-return]

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], hooks: PassHooks) -> InFlightTracker | None:
        """Runs forward and backward of all micro-batches of a step and reduces the gradients once, after the last."""
        self.accumulate(len(micro_batches))
        for index, inputs in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self.micro_step(last):
                hooks.enter("forward")
                with hooks.autocast():
                    losses, _ = self(*inputs)
                hooks.enter("backward")
                scaled = hooks.scale_loss(losses)
                if last:
                    hooks.losses_complete()
                    self.on_last_bucket = lambda: hooks.enter("sync")
                scaled.backward()
        return None

    def prepare_schedule(self, micro_batches: Sequence[tuple[Tensor, ...]], autocast: Autocast) -> None:
        """Builds what the first step with this number of micro-batches builds once, beside state (pipelines)."""

    def accumulate(self, micro_batches: int) -> None:
        """Lets autograd accumulate the gradients of rounded weights in float32, if a step has several micro-batches."""
        if micro_batches != self.micro_batches:
            self.micro_batches = micro_batches
            for parameter in rounded_parameters(self.module):
                parameter.grad_dtype = torch.float32 if micro_batches > 1 else parameter.dtype

    def warmup_backward(self, load_inputs: Callable[[], tuple[Tensor, ...] | None], autocast: Autocast) -> None:
        """Runs a backward pass whose gradients are discarded, where later passes depend on the first one (DDP)."""

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """The context of one micro-batch's forward and backward; on leaving the last one, gradients are reduced."""
        tensor = self.meshes.submesh("tensor")
        if tensor is None:
            yield
            return
        with loss_parallel():  # backward of a vocabulary-parallel loss needs it too
            yield
        if last:
            reduce_partial_gradients(self.module.parameters(), tensor)

    def reduce_scalars(self) -> None:
        """Sums the gradients of parameters that FSDP2 cannot shard."""

    def forward_loss(self, *inputs: Tensor) -> Tensor:
        """Returns the summed token losses of a forward pass without backward."""
        total, _ = self.module(*inputs)
        return total  # type: ignore[no-any-return]

    def after_update(self) -> None:
        """Called after the optimizer has changed the parameters."""

    def broadcast_buffers(self) -> None:
        """Copies the first data-parallel rank's stateful buffers to the others, as DDP does before forward."""
        for buffer in stateful_buffers(self.module):
            for group in self.groups:
                dist.broadcast(buffer, group=group, group_src=0)

    @property
    def wrapped_module(self) -> nn.Module:
        """The outermost module, including DDP's wrapper."""
        return self.module

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields (memory class, tensor) of tensors that the module does not list: unsharded parameters, buckets."""
        return ()

    def reshard(self) -> None:
        """Frees unsharded parameters after a forward pass outside a step (FSDP2)."""

    def pop_block_calls(self) -> int:
        """Returns a hash of the order of calls of the blocks since the last call; 0 where any order is right."""
        return 0

    def pop_gradient_reduction(self) -> GradientReduction:
        """Returns the gradient reduction since the last call; all zeros where it is not counted at every step."""
        return GradientReduction()
