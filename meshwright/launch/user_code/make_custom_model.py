"""Makes the CustomModel of a verb from what the user passed to it."""

from __future__ import annotations

from torch import nn

from meshwright.errors import ConfigError
from meshwright.launch.user_code.entry_points import call_without_arguments
from meshwright.launch.user_code.user_code import UserCode
from meshwright.parallel.infer_spec import infer_parallel_spec, merge
from meshwright.trainer.custom_model import CustomModel


def make_custom_model(user: UserCode) -> CustomModel | None:
    """Returns the model that the user brings, or None if the model is that of the config. All verbs call this."""
    if user.model is None:
        for argument in ("loss", "parallel_spec", "metrics", "init"):
            if getattr(user, argument) is not None:
                raise ConfigError(f"{argument} is given without a model", "expected model=... as well")
        return None
    module = user.model if isinstance(user.model, nn.Module) else call_without_arguments(user.model, "model")
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model is a {type(module).__name__}", "expected an nn.Module, or a callable that returns one"
        )
    return CustomModel(
        module,
        user.loss,
        merge(user.parallel_spec, infer_parallel_spec(module)),
        collate=user.collate,
        metrics=dict(user.metrics or {}),
        reduction=user.reduction,
    )
