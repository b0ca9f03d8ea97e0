"""Stand-ins for the modules of other pipeline stages, with which a stage runs the model's own forward.

A block of another stage passes its input on. The one before the first local block returns the hidden states that
arrived, and the one behind the last local block leaves the forward with the hidden states that it gets. A module of
`ParallelSpec.before` returns zeros of the traced shape, which reach no local block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.core.torch_private import TreeSpec, tree_flatten, tree_unflatten
from meshwright.errors import ConfigError

HIDDEN_STATES = "hidden_states"
"""the argument of a block that has the hidden states, if its first one has not"""

BlockRole = Literal["pass", "enter", "leave"]


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorShape:
        return TensorShape(tuple(tensor.shape), tensor.dtype)

    def zeros(self, device: torch.device) -> Tensor:
        """Zeros of this shape that take the memory of one element."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)


@dataclass(frozen=True)
class ModuleResult:
    """What a module returned: a tensor, or tensors and other values in tuples, dicts and model outputs."""

    leaves: tuple[Any, ...]
    """TensorShapes and other values"""
    tree: TreeSpec

    @staticmethod
    def of(value: Any) -> ModuleResult:
        leaves, tree = tree_flatten(value)
        return ModuleResult(tuple(TensorShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree)

    @property
    def hidden(self) -> TensorShape | None:
        """The first entry, which is that of the hidden states; None if it is no tensor."""
        return self.leaves[0] if self.leaves and isinstance(self.leaves[0], TensorShape) else None

    def rebuild(self, *first: Tensor, device: torch.device) -> Any:
        """The same structure with these tensors first and zeros for all others."""
        rest = self.leaves[len(first) :]
        zeros = [leaf.zeros(device) if isinstance(leaf, TensorShape) else leaf for leaf in rest]
        return tree_unflatten([*first, *zeros], self.tree)


@dataclass(frozen=True)
class ModelTrace:
    """Shapes of one forward pass of the full model on a micro-batch."""

    block_inputs: tuple[TensorShape, ...]
    """the hidden states that every block receives"""
    block_results: tuple[ModuleResult, ...]
    outer_results: dict[str, list[ModuleResult]]
    """what every module of `before` returned, call by call"""
    loss: TensorShape


@dataclass
class StagePass:
    """The forward pass that a stage runs now."""

    device: torch.device
    trace: ModelTrace
    received: Tensor | None = None
    """the hidden states of the previous stage"""
    calls: dict[str, int] = field(default_factory=dict)
    """calls of every stand-in for a module of `before`"""
    writes_in_place: bool = False
    """whether a module of the model changes its input in place, which zeros of one element do not allow"""


class StageOutput(BaseException):
    """Leaves the forward of a model behind the last block of a stage. It is no Exception, so that no handler of the
    model catches it.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StandIn(nn.Module):
    """Stands for a module of another stage. Its attributes are those of the original, on fake tensors."""

    def __init__(self, original: nn.Module, current: list[StagePass]) -> None:
        super().__init__()
        self._original = [original]  # in a list, it is no submodule
        self.current = current

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)


class BlockStandIn(StandIn):
    """Stands for a block of another stage."""

    def __init__(self, original: nn.Module, current: list[StagePass], index: int, role: BlockRole) -> None:
        super().__init__(original, current)
        self.index, self.role = index, role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_argument(args, kwargs)
        if self.role == "leave":
            raise StageOutput(hidden)
        [now] = self.current
        if self.role == "enter":
            assert now.received is not None
            hidden = now.received
        return now.trace.block_results[self.index].rebuild(hidden, device=now.device)


class OuterStandIn(StandIn):
    """Stands for a module before or after the blocks."""

    def __init__(self, original: nn.Module, current: list[StagePass], name: str) -> None:
        super().__init__(original, current)
        self.name = name

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        [now] = self.current
        call = now.calls[self.name] = now.calls.get(self.name, -1) + 1
        result = now.trace.outer_results[self.name][call].rebuild(device=now.device)
        if not now.writes_in_place:
            return result
        leaves, tree = tree_flatten(result)
        return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block."""
    hidden = args[0] if args else kwargs.get(HIDDEN_STATES)
    if not isinstance(hidden, Tensor):
        raise ConfigError(
            f"a block of the model gets no hidden states: its first argument is a {type(hidden).__name__}",
            f"expected a tensor as the first positional argument of every block, or as its argument {HIDDEN_STATES}",
        )
    return hidden
