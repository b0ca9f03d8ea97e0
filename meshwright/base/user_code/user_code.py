"""UserCode: the model, loss and data that a user passes to a verb, as one value. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.core.parallel.parallel_spec import ParallelSpec


@dataclass(frozen=True)
class UserCode:
    """What a user passes to `train`, `prove`, `plan`, `simulate` or `report`. Without a model, the verb uses the
    built-in model of the config.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    """a module, or a callable without arguments that builds it"""
    loss: Callable[..., Any] | None = None
    source: Any = None
    """a map-style dataset, or a callable without arguments that opens it"""
    parallel_spec: ParallelSpec | None = None
    collate: Callable[..., Any] | None = None
    """makes a batch of a list of samples"""
    metrics: Mapping[str, Callable[..., Any]] | None = None
    reduction: Literal["sum", "mean"] | None = None
    """what the loss returns: the sum over valid targets (the default), or their mean"""
    init: Callable[[str, Tensor], Any] | None = None
    """fills a parameter or buffer of a model on the meta device with its initial values"""
    callbacks: Any = None
    """callbacks, one or a sequence, or a callable without arguments that makes them"""
    optimizer: Callable[..., Any] | None = None
    """makes a torch.optim.Optimizer of parameter groups"""
    schedule: Callable[[int, int], float] | None = None
    """the learning rate of a step, as a multiple of optimizer.lr"""
    reward: Callable[..., Any] | None = None
    """the reward of a completion, in a run with rl.objective"""
    entry_points: Mapping[str, str] = field(default_factory=dict)
    """argument -> the MODULE:NAME that was typed for it on the command line"""

    def require_model(self, *arguments: str) -> None:
        """Raises a ConfigError if one of these arguments is given without a model."""
        for argument in arguments:
            if self.model is None and getattr(self, argument) is not None:
                raise ConfigError(f"{argument} is given without a model", f"try --model MODULE:NAME, or no {argument}")


NO_USER_CODE = UserCode()
