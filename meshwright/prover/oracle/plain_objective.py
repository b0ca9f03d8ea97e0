"""A user's model and loss on a list of samples, as a plain script would compute them: collate, forward, loss, count."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX
from meshwright.prover.trace import input_name

TARGETS = ("labels", "label", "targets", "target")
"""The names of entries that a model with a separate loss does not get."""


@dataclass(frozen=True)
class PlainObjective:
    """The module and the loss as the user wrote them."""

    module: nn.Module
    loss: Callable[[Any, Any], Any] | None
    """None: the model returns its loss, the mean over its valid targets"""
    collate: Callable[[list[Any]], Any] | None = None
    reduction: str | None = None
    """whether the loss is a mean or a sum, which is the default"""
    count_kind: str = "valid"
    """what is counted in an entry: valid targets, those but the first (shifted), nonzero values, or samples"""
    count_entry: str | None = "labels"
    """None: the loss returns the count"""
    ignored: int = IGNORE_INDEX
    """the value of integer targets that are not valid"""

    def batch(self, samples: Sequence[Any]) -> Any:
        """The batch of some samples: stacked, or what the user's function makes of them."""
        return stack(samples) if self.collate is None else as_tensors(self.collate(list(samples)))

    def total(self, batch: Any, dtype: torch.dtype, auxiliary: bool = True) -> Tensor:
        """The sum of the losses of all valid targets. Floating-point entries get a dtype. `auxiliary`: whether the
        auxiliary loss of routers, which is no sum over samples, is part of it.
        """
        batch = cast_floats(batch, dtype)
        if self.loss is None:
            outputs = self.module(**self.arguments(batch, with_targets=True))
            loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
            router, weight = getattr(outputs, "aux_loss", None), getattr(self.module, "router_aux_loss_coef", 0.0)
            if not auxiliary and isinstance(router, Tensor):
                loss = loss - weight * router
            is_sum = self.reduction == "sum" and not self.takes("num_items_in_batch")
            return loss if is_sum else loss * self.count(batch)
        result = self.result(batch)
        value = result[0] if isinstance(result, tuple) else result
        total: Tensor = torch.stack(list(value.values())).sum() if isinstance(value, Mapping) else value
        return total * self.count(batch) if self.reduction == "mean" else total

    def result(self, batch: Any) -> Any:
        """What the loss returns for the outputs of the model."""
        assert self.loss is not None
        if isinstance(batch, tuple):
            return self.loss(self.module(*batch[:-1]), batch[-1])
        return self.loss(self.module(**self.arguments(batch, with_targets=False)), batch)

    def arguments(self, batch: Any, with_targets: bool) -> dict[str, Any]:
        """The entries of a dict or dataclass that the forward of the model takes by name."""
        return {
            name: value for name, value in children(batch) if self.takes(name) and (with_targets or name not in TARGETS)
        }

    def takes(self, name: str) -> bool:
        """Whether the forward of the model takes an argument of this name."""
        parameters = inspect.signature(self.module.forward).parameters
        return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def count(self, batch: Any) -> int:
        """The number of valid targets."""
        entries = named_entries(batch)
        if self.count_entry is None:
            with torch.no_grad():
                return int(self.result(batch)[1])
        entry = entries[self.count_entry]
        if self.count_kind == "nonzero":
            return int(entry.count_nonzero())
        if self.count_kind == "samples" or entry.is_floating_point():
            return len(entry)
        counted = entry[..., 1:] if self.count_kind == "shifted" else entry
        return int((counted != self.ignored).sum())


def children(value: Any) -> list[tuple[str, Any]]:
    """(name, entry) of a dict, a dataclass or a tuple; none of an array."""
    if isinstance(value, Mapping):
        return [(str(name), entry) for name, entry in value.items()]
    if dataclasses.is_dataclass(value):
        return [(entry.name, getattr(value, entry.name)) for entry in dataclasses.fields(value)]
    return [(str(number), entry) for number, entry in enumerate(value)] if isinstance(value, tuple) else []


def rebuild(value: Any, entries: list[Any]) -> Any:
    """A container like this one with other entries."""
    if isinstance(value, tuple):
        return tuple(entries)
    names = [name for name, _ in children(value)]
    if isinstance(value, Mapping):
        return dict(zip(names, entries, strict=True))
    changed = copy.copy(value)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(changed, name, entry)
    return changed


def stack(samples: Sequence[Any]) -> Any:
    """Samples with the same entries as one, with a new first dimension."""
    first = samples[0]
    if not children(first):
        return torch.from_numpy(np.stack([np.asarray(sample) for sample in samples]))
    by_name = [dict(children(sample)) for sample in samples]
    return rebuild(first, [stack([entries[name] for entries in by_name]) for name, _ in children(first)])


def as_tensors(batch: Any) -> Any:
    """A batch whose entries may be arrays or lists, with tensors; a list of entries is a tuple."""
    if isinstance(batch, list) and any(isinstance(entry, (Tensor, np.ndarray)) for entry in batch):
        batch = tuple(batch)
    if not children(batch):
        return batch if isinstance(batch, Tensor) else torch.from_numpy(np.asarray(batch))
    return rebuild(batch, [as_tensors(entry) for _, entry in children(batch)])


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return rebuild(batch, [cast_floats(entry, dtype) for _, entry in children(batch)])


def leaves(batch: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield ".".join(path), batch
    for name, entry in children(batch):
        yield from leaves(entry, (*path, name))


def named_entries(batch: Any) -> dict[str, Tensor]:
    """The entries of a batch by name; those of a tuple are inputs, and the last one is the labels."""
    found = list(leaves(batch))
    if not isinstance(batch, tuple):
        return dict(found)
    return {input_name(number, len(found)): tensor for number, (_, tensor) in enumerate(found)}
