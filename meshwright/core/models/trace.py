"""Traces any module on fake tensors: its parameters, and the FLOPs and memory of each of its blocks.

Forward and backward run once on fake tensors, which have shapes and no values. Hooks on the blocks tell which part of
the model runs: what stands before the blocks, each block, or what stands after them. Operators between two blocks count
for the block before them. A memory tracker sees every storage that an operator returns, until it is freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from meshwright.base.models.spec import (
    AFTER,
    BEFORE,
    ROOT,
    BlockSpec,
    Cost,
    ModelSpec,
    ModuleCost,
    ParameterSpec,
)
from meshwright.core.telemetry.comm_counter import tensors_in
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.core.torch_private import FakeTensors, OpOverload, patched_for_simulation

ModuleT = TypeVar("ModuleT", bound=nn.Module)
NOT_TRANSIENT = ("parameter", "gradient", "optimizer", "buffer")
"""Memory classes that the passes of a model do not free."""


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """FLOPs of attention in forward, with all pairs of tokens."""
    batch, heads, tokens, size = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (size + value.shape[-1])


def cpu_attention_flops(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return attention_flops(query, key, value)


def cpu_attention_backward_flops(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any
) -> int:
    """Backward computes the scores again, and four more products: torch counts flash attention on a GPU like that."""
    return attention_flops(query, key, value) * 5 // 2


def grouped_mm_flops(a: Tensor, b: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


aten = torch.ops.aten
FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: cpu_attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: cpu_attention_backward_flops,
    aten._grouped_mm: grouped_mm_flops,
}
"""FLOPs of operators that torch.utils.flop_counter does not count."""


def copy_to_meta(module: ModuleT) -> ModuleT:
    """Returns a copy of a module whose parameters and buffers are on the meta device; tied weights stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


@dataclass(frozen=True)
class TracedModule:
    """A model and its loss as one module on the meta device, (tensors of a micro-batch) -> (loss sum, count)."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    """the blocks by name, in the order in which they run; empty: the whole model runs as `before`"""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """the names of the modules with parameters that run before and after the blocks"""
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    """parameters that tensor parallelism shards, with the dimension"""
    expert_weights: frozenset[str] = frozenset()
    """parameters whose first dimension is that of the experts"""
    prefix: str = ""
    """what names of parameters have in addition inside `module`"""


@dataclass
class UnitTrace:
    """The counts of one block, or of the modules before or after the blocks."""

    flops: int = 0
    backward_flops: int = 0
    activations: int = 0
    matmul_outputs: int = 0
    output: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    gradients_at_peak: int = 0
    traffic: int = 0
    backward_traffic: int = 0
    operators: int = 0


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of the first attention of a model."""

    heads: int
    kv_heads: int
    head_dim: int


class PassTracker(MemoryTracker):
    """Counts forward and backward of one micro-batch by unit."""

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        super().__init__(module)
        self.units = {name: UnitTrace() for name in units}
        self.attention: AttentionShape | None = None
        self.routed_tokens = 0
        self.unit, self.in_backward = BEFORE, False
        self.start = self.peak_bytes = self.peak_with_gradients = self.gradients_before = 0
        self.saved: dict[str, list[int]] = {name: [] for name in units}
        """live bytes at the end of every forward pass of a unit: backward goes back to them"""

    @property
    def live(self) -> int:
        """Bytes of activations and temporary tensors."""
        return self._total - sum(self._bytes[kind] for kind in NOT_TRANSIENT)

    def enter_unit(self, unit: str) -> None:
        """Forward begins a unit, or backward reaches it from behind."""
        self.leave_unit()
        self.unit = unit
        self.start = self.peak_bytes = self.peak_with_gradients = self.live
        self.gradients_before = self._bytes["gradient"]

    def leave_unit(self) -> None:
        self._forget_freed()
        trace = self.units[self.unit]
        if not self.in_backward:
            saved = self.live - self.start
            trace.activations += saved
            trace.forward_peak = max(trace.forward_peak, self.peak_bytes - self.start - max(0, saved))
            self.saved[self.unit].append(self.live)
        elif self.saved[self.unit]:
            trace.backward_peak = max(trace.backward_peak, self.peak_bytes - self.saved[self.unit].pop())
            trace.gradients_at_peak = max(trace.gradients_at_peak, self.peak_with_gradients - self.peak_bytes)

    def start_backward(self) -> None:
        """Forward is over; backward begins with the unit at which forward ended."""
        unit = self.unit
        self.leave_unit()
        self.in_backward = True
        self.phase = "backward"
        self.unit = unit
        self.start = self.peak_bytes = self.peak_with_gradients = self.live
        self.gradients_before = self._bytes["gradient"]

    def _mark_peaks(self, memory_class: str, size: int) -> None:
        super()._mark_peaks(memory_class, size)
        live = self.live
        self.peak_bytes = max(self.peak_bytes, live)
        self.peak_with_gradients = max(
            self.peak_with_gradients, live + self._bytes["gradient"] - self.gradients_before
        )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        computes = isinstance(func, OpOverload) and not func.is_view and func.overloadpacket is not aten._unsafe_view
        if computes and any(True for _ in tensors_in(result)):
            self.count_operator(func, args, kwargs or {}, result)
        return result

    def count_operator(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        trace, packet = self.units[self.unit], func.overloadpacket
        formula = FLOPS.get(packet)
        if formula is not None:
            flops = formula(*args, **kwargs)
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        else:
            flops = 0
        if "attention" in packet.__name__ and self.attention is None:
            query, key = list(tensors_in(args))[:2]
            self.attention = AttentionShape(query.shape[1], key.shape[1], query.shape[-1])
        if packet is aten._grouped_mm:
            self.routed_tokens = self.routed_tokens or args[0].shape[0]
        reads = () if packet is aten.embedding else tensors_in(args)  # a lookup reads as much as it writes
        moved = sum(tensor.nbytes for tensor in (*reads, *tensors_in(result)))
        if self.in_backward:
            trace.backward_flops += flops
            trace.backward_traffic += 0 if flops else moved
        else:
            trace.flops += flops
            trace.operators += 1
            trace.traffic += 0 if flops else moved
            if flops and "convolution" not in packet.__name__:
                trace.matmul_outputs += next((t.nbytes for t in tensors_in(result)), 0)


class UnitHooks:
    """Tells a tracker which unit runs, by hooks on the blocks and on the gradients of their inputs and outputs."""

    def __init__(self, tracker: PassTracker, blocks: Mapping[str, nn.Module]) -> None:
        self.tracker, self.last = tracker, (list(blocks) or [""])[-1]
        self.started = False
        self.handles = []
        for name, block in blocks.items():
            self.handles.append(block.register_forward_pre_hook(self.before_block(name), with_kwargs=True))
            self.handles.append(block.register_forward_hook(self.after_block(name)))

    def before_block(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.tracker.in_backward:
                return  # activation checkpointing recomputes the block
            self.tracker.enter_unit(name)
            if not self.started:
                self.started = True
                self.on_gradient([*args, *kwargs.values()], BEFORE)

        return hook

    def after_block(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.tracker.in_backward:
                return
            hidden = self.on_gradient([output], name)
            self.tracker.units[name].output = hidden.nbytes if hidden is not None else 0
            if name == self.last:
                self.tracker.enter_unit(AFTER)

        return hook

    def on_gradient(self, values: Iterable[Any], unit: str) -> Tensor | None:
        """Backward reaches `unit` when the gradient of the first of these tensors that has one is computed."""
        for tensor in tensors_in(list(nested_values(values))):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(lambda _gradient: self.tracker.enter_unit(unit))
                return tensor
        return None

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def nested_values(values: Iterable[Any]) -> Iterable[Any]:
    """The tensors of lists, tuples, dicts and dataclasses that behave like dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from nested_values(value.values())
        elif isinstance(value, list | tuple):
            yield from nested_values(value)


@dataclass(frozen=True)
class PassTrace:
    """Forward and backward of one micro-batch."""

    samples: int
    units: dict[str, UnitTrace]
    attention: AttentionShape | None
    routed_tokens: int
    """rows of the first matrix product with the weights of several experts: tokens times experts per token"""


def trace_pass(
    traced: TracedModule,
    batch: Sequence[Tensor],
    samples: int,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PassTrace:
    """Runs forward and backward on fake tensors with the shapes and dtypes of `batch`, but this many samples."""
    fake_tensors = FakeTensors()
    with patched_for_simulation(), fake_tensors.active():
        module = allocate_fake(traced.module)
        names = dict(module.named_modules())
        blocks = {name: names[traced.prefix + name] for name in traced.blocks}
        inputs = [torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in batch]
        tracker = PassTracker(module, [BEFORE, *blocks, AFTER])
        hooks = UnitHooks(tracker, blocks)
        try:
            with tracker:
                tracker.enter_unit(BEFORE if blocks else AFTER)
                with autocast():
                    losses, _ = module(*inputs)
                tracker.start_backward()
                losses.backward()
                tracker.leave_unit()
        finally:
            hooks.remove()
    return PassTrace(samples, tracker.units, tracker.attention, tracker.routed_tokens)


def allocate_fake(module: ModuleT) -> ModuleT:
    """Returns a copy of a module on the meta device with fake parameters and buffers on the CPU."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="cpu")
    return copy.deepcopy(module, memo)


def fit_costs(passes: Mapping[int, UnitTrace]) -> ModuleCost:
    """The costs of a unit as functions of the number of samples, from one or two passes."""

    def fit(name: str) -> Cost:
        counts = {samples: getattr(trace, name) for samples, trace in passes.items()}
        (few, count_few), (many, count_many) = min(counts.items()), max(counts.items())
        if few == many:
            return Cost(per_sample=count_few / few)
        per_sample = (count_many - count_few) / (many - few)
        return Cost(count_few - few * per_sample, per_sample)

    names = [name for name in vars(UnitTrace()) if name != "operators"]
    return ModuleCost(**{name: fit(name) for name in names}, operators=next(iter(passes.values())).operators)


def trace_model(
    traced: TracedModule,
    name: str,
    batch: Sequence[Tensor],
    samples: Sequence[int],
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[ModelSpec, PassTrace]:
    """Makes the ModelSpec of a module. `samples` are one or two sizes of a micro-batch; with two, costs have a constant
    part. Neither memory for the model nor for activations is allocated.
    """
    passes = {count: trace_pass(traced, batch, count, autocast) for count in samples}

    def cost(unit: str) -> ModuleCost:
        return fit_costs({count: pass_trace.units[unit] for count, pass_trace in passes.items()})

    spec = ModelSpec(
        name,
        tuple(parameter_specs(traced)),
        tuple(BlockSpec(block, cost(block)) for block in traced.blocks),
        traced.before,
        traced.after,
        cost(BEFORE),
        cost(AFTER),
        tied=tied_names(traced),
    )
    return spec, passes[samples[0]]


def parameter_specs(traced: TracedModule) -> Iterable[ParameterSpec]:
    """Every parameter once, in the order of the module."""
    units = outer_units(traced)
    for full_name, parameter in traced.module.named_parameters():
        name = full_name.removeprefix(traced.prefix)
        yield ParameterSpec(
            name,
            tuple(parameter.shape),
            next((unit for module, unit in units.items() if name.startswith(f"{module}.")), ROOT),
            traced.tp_dims.get(name),
            name in traced.expert_weights,
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
        )


def outer_units(traced: TracedModule) -> dict[str, str]:
    """Module -> its FSDP unit. Modules around the blocks that share a weight belong to the root unit."""
    tied = {name for pair in tied_names(traced).items() for name in pair}
    units = {block: block for block in traced.blocks}
    for unit, modules in ((BEFORE, traced.before), (AFTER, traced.after)):
        is_shared = any(name.startswith(tuple(f"{module}." for module in modules)) for name in tied)
        units |= dict.fromkeys(modules, ROOT if is_shared else unit)
    return units


def tied_names(traced: TracedModule) -> dict[str, str]:
    """Names of tied weights: copy -> owner."""
    owners: dict[int, str] = {}
    tied = {}
    for full_name, parameter in traced.module.named_parameters(remove_duplicate=False):
        name = full_name.removeprefix(traced.prefix)
        if owners.setdefault(id(parameter), name) != name:
            tied[name] = owners[id(parameter)]
    return tied
