"""What is proven when a user brings the model: the model, its loss and its data, which a proof leaves as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.source import Source
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.prover.oracle.plain_objective import PlainObjective
from meshwright.prover.tracer import input_names


@dataclass(frozen=True)
class Subject:
    """A user's model and data. A proof compares all steps of its runs itself, and names the cause of a difference."""

    custom: CustomModel
    sources: list[Source]

    def __post_init__(self) -> None:
        object.__setattr__(self, "custom", replace(self.custom, plain_pass=None))

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.custom.module).__qualname__

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores the weights afterwards: a run that ends writes the trained ones into the user's modules."""
        tensors = [t for part in self.custom.modules() for t in (*part.parameters(), *part.buffers())]
        values = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)


def plain_objective(custom: CustomModel) -> PlainObjective:
    """The user's model and loss, without anything of the trainer's."""
    rule, names = custom.batch.count, input_names(custom)
    kind, entry = (rule.kind, names[rule.entry]) if rule is not None else ("valid", None)
    ignored = IGNORE_INDEX if rule is None else rule.ignored
    return PlainObjective(custom.module, custom.loss, custom.collate, custom.reduction, kind, entry, ignored)


def find_tied_parameters(modules: list[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Parameters that have several names: the first name -> the others."""
    names: dict[int, list[str]] = {}
    for prefix, module in zip(("model.", "loss."), modules, strict=False):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(prefix + name)
    return {first: tuple(others) for first, *others in names.values() if others}
