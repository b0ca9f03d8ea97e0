"""The memory ledger: live tensor bytes by what they are for, and their peak, while it is open.

Bytes are those of storages, on any device, each counted once however many tensors view it. A storage is counted from
the first operator that returns it until it is freed; what a kernel takes and frees inside itself is not seen.
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

from meshwright.telemetry.comm_counter import collective_of, has_wrappers, tensors_in
from meshwright.torch_private import OpOverload, TorchDispatchMode

KINDS = ("parameter", "gradient", "optimizer", "buffer", "activation", "communication", "temporary")
UNINITIALIZED = "fresh"
"""A buffer that nobody has written yet. Its bytes are live, but which class they belong to shows only later: FSDP takes
an empty buffer first and makes a collective of it afterwards. Reported under temporary."""
UNCLASSIFIED = (UNINITIALIZED, "activation", "temporary")
"""What a storage is as long as nobody has said better."""

ClassifiedTensors = Iterable[tuple[str, Tensor]]


class TrackedStorage(weakref.ref[UntypedStorage]):
    """A storage that is counted, without keeping it."""

    __slots__ = ("key", "kind", "size")
    key: int
    kind: str
    size: int


class MemoryTracker(TorchDispatchMode):
    """Counts inside `with ledger:`, once. The caller says the `phase`: what is born in forward is an activation, and
    temporary what is born elsewhere.

    `classify` names tensors that the model alone does not show (FSDP's gathered parameters, optimizer state made
    on the way). It is asked on entering, at every new phase, on leaving, and where a collective leaves buffers that
    nobody has named. To see DDP's buckets from the start, enter before gradients are cleared, or `know` them.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        optimizer_tensors: Iterable[Tensor] = (),
        classify: Callable[[], ClassifiedTensors] = lambda: (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = dict.fromkeys(KINDS, 0)
        """the largest bytes of each class by itself"""
        self.at_peak = dict.fromkeys(KINDS, 0)
        """the classes at the moment of the largest total"""
        self._given = (model, tuple(optimizer_tensors), classify)
        self._classify: Callable[[], ClassifiedTensors] = lambda: ()
        self._bytes = dict.fromkeys((*KINDS, UNINITIALIZED), 0)
        self._total = self._largest = 0
        self._held: dict[int, TrackedStorage] = {}
        self._freed: deque[TrackedStorage] = deque()
        self._hooks: dict[int, RemovableHandle] = {}
        self._parameters: list[Tensor] = []
        """whose gradients are known by hooks, or, where somebody writes them by himself, at the next phase"""
        self._phase = "forward"
        # DDP moves a gradient into its bucket after the hook that tells of it: there one looks a little later.
        self._buckets = isinstance(model, DistributedDataParallel)
        self._last: Tensor | None = None

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._settle()

    @property
    def current_bytes(self) -> dict[str, int]:
        """Live bytes by class."""
        self._forget_freed()
        return self._snapshot()

    @property
    def total(self) -> int:
        return sum(self.current_bytes.values())

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def assign_class(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """From now on these tensors' storages count as this kind; a parameter's gradient will be known by itself."""
        for tensor in tensors:
            for part in unwrapped(tensor):
                self._see(part.untyped_storage(), kind)
            if kind == "parameter" and tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._hooks:
                self._hooks[id(tensor)] = tensor.register_post_accumulate_grad_hook(self._gradient_came)
                self._parameters.append(tensor)
                self._gradient_of(tensor)

    def __enter__(self) -> MemoryTracker:
        model, optimizer_tensors, self._classify = self._given
        del self._given  # a ledger that is kept for its numbers keeps no tensor alive
        self.assign_class("parameter", model.parameters())
        self.assign_class("buffer", model.buffers())
        self.assign_class("optimizer", optimizer_tensors)
        self._settle()
        self._wrap_resize()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._unwrap_resize()
        try:
            self._settle()
        finally:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._parameters.clear()
            self._held.clear()
            self._last, self._classify = None, lambda: ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        collective = collective_of(func)
        if collective and self._last is not None:
            self._gradient_of(self._last)
        result = func(*args, **(kwargs or {}))
        self._forget_freed()
        if collective:
            for tensor in buffers_of(func, collective, args, result):
                self._see(tensor.untyped_storage(), "communication", only=UNCLASSIFIED)
            if self._bytes[UNINITIALIZED]:
                self._settle()
        else:
            born = "activation" if self._phase == "forward" else "temporary"
            empty, writes = nature(func)
            for tensor in tensors_in(result):
                for part in unwrapped(tensor):  # a result that is still on its way comes wrapped
                    self._see(
                        part.untyped_storage(),
                        UNINITIALIZED if empty else born,
                        only=(UNINITIALIZED,) if writes else (),
                    )
        return result

    def _see(self, storage: UntypedStorage, kind: str, only: tuple[str, ...] = (*KINDS, UNINITIALIZED)) -> None:
        """Counts a storage as this kind, or leaves it the kind it has unless that is one of `only`."""
        held = self._held.get(id(storage))
        if held is None or held() is not storage:
            held = TrackedStorage(storage, self._freed.append)
            held.key, held.kind, held.size = id(storage), kind, 0
            self._held[held.key] = held
        if held.kind not in only:
            kind = held.kind
        size = storage.nbytes()
        if (kind, size) != (held.kind, held.size):
            self._bytes[held.kind] -= held.size
            self._bytes[kind] += size
            self._total += size - held.size
            held.kind, held.size = kind, size
            self._mark_peaks(kind, size)

    def _mark_peaks(self, kind: str, _size: int) -> None:
        """After every change: so many bytes are now of this class."""
        if kind != UNINITIALIZED and self._bytes[kind] > self.peak[kind]:
            self.peak[kind] = self._bytes[kind]
        if self._total >= self._largest:  # equal: a storage of the peak got its right name
            self._largest = self._total
            self.at_peak = self._snapshot()

    def _snapshot(self) -> dict[str, int]:
        counted = {kind: self._bytes[kind] for kind in KINDS}
        counted["temporary"] += self._bytes[UNINITIALIZED]
        return counted

    def _forget_freed(self) -> None:
        """A storage may be freed in any thread, in the middle of anything; it only leaves a note then."""
        while self._freed:
            held = self._freed.popleft()
            if self._held.get(held.key) is held:
                del self._held[held.key]
            self._bytes[held.kind] -= held.size
            self._total -= held.size

    def _gradient_came(self, parameter: Tensor) -> None:
        if self._last is not None:
            self._gradient_of(self._last)
        if self._buckets:
            self._last = parameter
        else:
            self._gradient_of(parameter)

    def _gradient_of(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._forget_freed()
            self.assign_class("gradient", [parameter.grad])

    def _settle(self) -> None:
        """Gives names to what has none yet."""
        self._forget_freed()
        if self._last is not None:
            self._gradient_of(self._last)
        for kind, tensor in self._classify():
            self.assign_class(kind, [tensor])
        for parameter in self._parameters:
            self._gradient_of(parameter)

    def _wrap_resize(self) -> None:
        """FSDP frees and takes back gathered parameters by resizing their storages, which no operator shows."""
        original: Any = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            resized = original(storage, size)
            self._forget_freed()
            self._see(storage, UNINITIALIZED, only=())
            return resized

        self._own_resize = vars(UntypedStorage).get("resize_")
        UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]

    def _unwrap_resize(self) -> None:
        if self._own_resize is None:
            del UntypedStorage.resize_  # the inherited one shows again
        else:
            UntypedStorage.resize_ = self._own_resize  # type: ignore[method-assign]


@cache
def nature(func: Any) -> tuple[bool, bool]:
    """Whether an operator gives memory with nothing in it, and whether it writes into memory that it was given."""
    if not isinstance(func, OpOverload):
        return False, False
    name = func.name().partition("::")[2].partition(".")[0]
    return name.removeprefix("new_") in ("empty", "empty_strided", "empty_like"), func._schema.is_mutable


def buffers_of(func: OpOverload, collective: str, args: Any, result: Any) -> Iterator[Tensor]:
    """The tensors that exist for a collective's sake: what it fills, and the flat input of a reduce-scatter."""
    if func.namespace != "c10d":
        yield from tensors_in(result)
    elif collective not in ("send", "barrier"):
        yield from tensors_in(args[0])
        if collective == "reduce_scatter":
            yield from tensors_in(args[1])


def unwrapped(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside one that wraps others: a DTensor's local shard, and never its global size."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:  # a DTensor also lists its mesh
            yield from unwrapped(getattr(value, name))
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        yield value
