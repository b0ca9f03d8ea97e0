"""Tracks live tensor bytes by memory class, and their peak, as a dispatch mode.

Bytes are those of storages, on any device; a storage counts once, however many tensors view it. It counts from the
first operator that returns it until it is freed. Memory that a kernel allocates and frees internally is not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from meshwright.base.records.memory_classes import TENSOR_CLASSES
from meshwright.core.fake_operators import RunOperator, is_wrapper, run_operator
from meshwright.core.telemetry.comm_counter import CountingMode, collective_of, tensors_in
from meshwright.core.torch_private import OpOverload

UNINITIALIZED = "uninitialized"
"""The internal class of an empty buffer, which is reported as temporary. Its class shows only when it is used: FSDP
allocates an empty buffer first and passes it to a collective afterwards."""
UNCLASSIFIED = (UNINITIALIZED, "activation", "temporary")
"""The classes that a storage has until a better one is known."""

ClassifiedTensors = Iterable[tuple[str, Tensor]]


class TrackedStorage(weakref.ref[UntypedStorage]):
    """A weak reference to a counted storage, with its class and size."""

    __slots__ = ("key", "memory_class", "size")
    key: int
    memory_class: str
    size: int


class MemoryTracker(CountingMode):
    """Counts inside one `with` block. The caller sets `phase`: a new tensor is an activation in forward, and temporary
    in any other phase.

    `internal_tensors` yields (class, tensor) of tensors that the model does not list (FSDP's unsharded parameters,
    optimizer state). It is called on entering, at every new phase, on leaving, and after a collective that leaves
    unclassified buffers. To see DDP's buckets from the start, enter before gradients are cleared, or `assign_class`
    them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_tensors: Iterable[Tensor] = (),
        internal_tensors: Callable[[], ClassifiedTensors] = lambda: (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = dict.fromkeys(TENSOR_CLASSES, 0)
        """the peak bytes of each class by itself"""
        self.at_peak = dict.fromkeys(TENSOR_CLASSES, 0)
        """the bytes of each class at the moment of the largest total"""
        self._arguments = (model, tuple(optimizer_tensors), internal_tensors)
        self._internal_tensors: Callable[[], ClassifiedTensors] = lambda: ()
        self._bytes = dict.fromkeys((*TENSOR_CLASSES, UNINITIALIZED), 0)
        self._total = self._largest = 0
        self._storages: dict[int, TrackedStorage] = {}
        self._freed: deque[TrackedStorage] = deque()
        self._hooks: dict[int, RemovableHandle] = {}
        self._parameters: list[Tensor] = []
        """parameters whose gradients are classified by a hook, or at the next phase where .grad is assigned directly"""
        self._phase = "forward"
        # DDP moves a gradient into its bucket after the gradient hook has run: it is classified a little later.
        self._uses_ddp = isinstance(model, DistributedDataParallel)
        self._last_parameter: Tensor | None = None

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._classify()

    @property
    def current_bytes(self) -> dict[str, int]:
        """The live bytes of every class."""
        self._forget_freed()
        return self._snapshot()

    @property
    def total(self) -> int:
        return sum(self.current_bytes.values())

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def assign_class(self, memory_class: str, tensors: Iterable[Tensor]) -> None:
        """Counts these tensors' storages as this class from now on. Gradients of parameters follow by themselves."""
        for tensor in tensors:
            for plain in unwrapped(tensor):
                self._count(plain.untyped_storage(), memory_class)
            if (
                memory_class == "parameter"
                and tensor.requires_grad
                and tensor.is_leaf
                and id(tensor) not in self._hooks
            ):
                self._hooks[id(tensor)] = tensor.register_post_accumulate_grad_hook(self._on_gradient)
                self._parameters.append(tensor)
                self._gradient_of(tensor)

    def begin(self) -> None:
        """Begins to count; operators count if they are run by `observe`."""
        model, optimizer_tensors, self._internal_tensors = self._arguments
        del self._arguments  # a tracker that is kept for its numbers keeps no tensor alive
        self.assign_class("parameter", model.parameters())
        self.assign_class("buffer", model.buffers())
        self.assign_class("optimizer", optimizer_tensors)
        self._classify()
        self._wrap_resize()

    def end(self) -> None:
        """Stops counting."""
        self._unwrap_resize()
        try:
            self._classify()
        finally:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._parameters.clear()
            self._storages.clear()
            self._last_parameter, self._internal_tensors = None, lambda: ()

    def __enter__(self) -> MemoryTracker:
        self.begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.end()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunOperator = run_operator) -> Any:
        collective = collective_of(func)
        if collective and self._last_parameter is not None:
            self._gradient_of(self._last_parameter)
        result = run(func, args, kwargs)
        self._forget_freed()
        if collective:
            for tensor in buffers_of(func, collective, args, result):
                self._count(tensor.untyped_storage(), "communication", only=UNCLASSIFIED)
            if self._bytes[UNINITIALIZED]:
                self._classify()
        else:
            empty, writes = operator_effects(func)
            new_class = UNINITIALIZED if empty else "activation" if self._phase == "forward" else "temporary"
            only = (UNINITIALIZED,) if writes else ()
            for tensor in tensors_in(result):
                for plain in unwrapped(tensor):  # the result of an asynchronous collective is wrapped
                    self._count(plain.untyped_storage(), new_class, only)
        return result

    def _count(
        self, storage: UntypedStorage, memory_class: str, only: tuple[str, ...] = (*TENSOR_CLASSES, UNINITIALIZED)
    ) -> None:
        """Counts a storage as this class; one that is already counted keeps its class unless that is one of `only`."""
        entry = self._storages.get(id(storage))
        if entry is None or entry() is not storage:
            entry = TrackedStorage(storage, self._freed.append)
            entry.key, entry.memory_class, entry.size = id(storage), memory_class, 0
            self._storages[entry.key] = entry
        if entry.memory_class not in only:
            memory_class = entry.memory_class
        size = storage.nbytes()
        if (memory_class, size) != (entry.memory_class, entry.size):
            self._bytes[entry.memory_class] -= entry.size
            self._bytes[memory_class] += size
            self._total += size - entry.size
            entry.memory_class, entry.size = memory_class, size
            self._mark_peaks(memory_class, size)

    def _mark_peaks(self, memory_class: str, _size: int) -> None:
        """Updates the peaks after a change of a class."""
        if memory_class != UNINITIALIZED and self._bytes[memory_class] > self.peak[memory_class]:
            self.peak[memory_class] = self._bytes[memory_class]
        if self._total >= self._largest:  # equal: a storage of the peak was classified
            self._largest = self._total
            self.at_peak = self._snapshot()

    def _snapshot(self) -> dict[str, int]:
        counted = {memory_class: self._bytes[memory_class] for memory_class in TENSOR_CLASSES}
        counted["temporary"] += self._bytes[UNINITIALIZED]
        return counted

    def _forget_freed(self) -> None:
        """Subtracts freed storages. A storage may be freed in any thread, so its callback only queues it."""
        while self._freed:
            entry = self._freed.popleft()
            if self._storages.get(entry.key) is entry:
                del self._storages[entry.key]
            self._bytes[entry.memory_class] -= entry.size
            self._total -= entry.size

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._last_parameter is not None:
            self._gradient_of(self._last_parameter)
        if self._uses_ddp:
            self._last_parameter = parameter
        else:
            self._gradient_of(parameter)

    def _gradient_of(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._forget_freed()
            self.assign_class("gradient", [parameter.grad])

    def _classify(self) -> None:
        """Classifies the tensors that have no class yet."""
        self._forget_freed()
        if self._last_parameter is not None:
            self._gradient_of(self._last_parameter)
        for memory_class, tensor in self._internal_tensors():
            self.assign_class(memory_class, [tensor])
        for parameter in self._parameters:
            self._gradient_of(parameter)

    def _wrap_resize(self) -> None:
        """Wraps `UntypedStorage.resize_`, by which FSDP frees and reallocates parameters without an operator."""
        original: Any = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            resized = original(storage, size)
            self._forget_freed()
            self._count(storage, UNINITIALIZED, only=())
            return resized

        self._original_resize = vars(UntypedStorage).get("resize_")
        UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]

    def _unwrap_resize(self) -> None:
        if self._original_resize is None:
            del UntypedStorage.resize_  # the inherited method is visible again
        else:
            UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]


@cache
def operator_effects(func: Any) -> tuple[bool, bool]:
    """Returns whether an operator returns uninitialized memory, and whether it mutates an argument."""
    if not isinstance(func, OpOverload):
        return False, False
    name = func.name().partition("::")[2].partition(".")[0]
    return name.removeprefix("new_") in ("empty", "empty_strided", "empty_like"), func._schema.is_mutable


def buffers_of(func: OpOverload, collective: str, args: Any, result: Any) -> Iterator[Tensor]:
    """Yields the buffers that exist for a collective: its outputs, and the flat input of a reduce-scatter."""
    if func.namespace != "c10d":
        yield from tensors_in(result)
    elif collective not in ("send", "barrier"):
        yield from tensors_in(args[0])
        if collective == "reduce_scatter":
            yield from tensors_in(args[1])


def unwrapped(value: Any) -> Iterator[Tensor]:
    """Yields the plain tensors inside a tensor subclass: of a DTensor its local shard."""
    kind: Any = type(value)
    if is_wrapper(kind):
        for name in value.__tensor_flatten__()[0]:  # a DTensor also lists its device mesh
            yield from unwrapped(getattr(value, name))
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        yield value
