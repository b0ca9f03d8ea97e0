"""Compares model and loss as the user gave them with their copies, which ranks train, on the first samples.

A loss may read the given model through a closure, such as an auxiliary loss that forward keeps in the module. The
forward of a copy does not set that, and training would minimize another loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.base.user_code.entry_points import describe_user_error
from meshwright.core.parallel.data_parallel.replica_check import parameter_checksum
from meshwright.core.parallel.materialize import named_tensors
from meshwright.core.parallel.parallel_model import unchanged_module
from meshwright.core.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.core.trainer.custom_model import MODEL_PREFIX, CustomModel, disable_caches, kept_results
from meshwright.core.trainer.first_batch.first_samples import Flat
from meshwright.core.trainer.first_batch.plain_pass import Computed, run_pass
from meshwright.core.trainer.objective import Objective
from meshwright.errors import ConfigError

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference of two passes that run the same operators in the same order; more than that is another result."""
NOT_COMPARED = "model and loss as given are not compared with the copies that ranks train"
CPU = torch.device("cpu")


def compare_with_given(custom: CustomModel, flat: Flat, dtype: torch.dtype) -> tuple[list[str], tuple[str, ...]]:
    """Raises ConfigError if model and loss as given compute another loss or gradient than their copies. Returns notes,
    and the names of the parameters that a forward pass changes.
    """
    own = next((p.dtype for p in custom.module.parameters() if p.is_floating_point()), dtype)
    dtype = own if own in TOLERANCES else dtype
    copied_objective = custom.build_objective(CPU, dtype)  # before the given model may have changed what it keeps
    try:
        with as_given(custom, dtype) as objective:
            before = parameter_checksums(objective)
            given = run_pass(objective, flat)
            changed = tuple(
                name for name, checksum in parameter_checksums(objective).items() if before[name] != checksum
            )
            kept = [name for module in custom.modules() for name, _ in kept_results(module)]
    except Exception as error:  # noqa: BLE001  a user's model may raise anything
        return [f"{NOT_COMPARED}: {describe_user_error(error)}"], ()
    copied: Computed | str
    try:
        copied = run_pass(copied_objective, flat)
        name = given.difference(copied, TOLERANCES[dtype], custom.frozen) if math.isfinite(given.loss) else ""
    except Exception as error:  # noqa: BLE001
        name, copied = "loss", describe_user_error(error)
    if not name:
        return [], changed
    try:
        with as_given(custom, dtype) as objective:
            again = run_pass(objective, flat)
    except Exception as error:  # noqa: BLE001
        return [f"{NOT_COMPARED}: the second pass of them raises {describe_user_error(error)}"], changed
    if given.difference(again, TOLERANCES[dtype], custom.frozen):
        return [f"{NOT_COMPARED}: two passes of them differ"], changed
    if isinstance(copied, str):
        raise given_error(f"loss of the first batch is {given.loss:.6g}", f"it raises {copied}", kept)
    if name == "loss":
        raise given_error(f"loss of the first batch is {given.loss:.6g}", f"{copied.loss:.6g}", kept)
    quantity = f"norm of the gradient of {name.removeprefix(MODEL_PREFIX)} on the first batch"
    raise given_error(f"{quantity} is {given.norm(name):.6g}", f"{copied.norm(name):.6g}", kept)


@contextmanager
def as_given(custom: CustomModel, dtype: torch.dtype) -> Iterator[Objective]:
    """The user's own objects, with clones of their values in a dtype. Everything is restored."""
    tensors = list(dict.fromkeys(tensor for module in custom.modules() for _, tensor in named_tensors(module)))
    values = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    children = [child for module in custom.modules() for child in module.modules()]
    classes = [(child, child.__class__) for child in children]
    configs: list[Any] = [getattr(child, "config", None) for child in children]
    caches = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            tensor.grad = None
        for module in custom.modules():
            synchronize_batch_norm(module)
        disable_caches(custom.module)
        objective = custom.objective_of(custom.module, custom.loss)
        with unchanged_module(objective):
            yield objective
    finally:
        for tensor, value, gradient in values:
            tensor.grad = None
            tensor.data = value
            tensor.grad = gradient
        for child, kind in classes:
            child.__class__ = kind
        for config, use_cache in caches:
            config.use_cache = use_cache


def given_error(given: str, copied: str, kept: list[str]) -> ConfigError:
    """The error for copies that compute something else than the user's own objects."""
    what = f"an auxiliary loss that forward keeps in {' and '.join(kept[:2])}" if kept else "what forward keeps in it"
    return ConfigError(
        f"the {given} with the model and loss as given, and with the copies that ranks train {copied}: the loss, or a "
        f"hook, reads the given model through a closure, such as {what}",
        "try to return it from forward with the outputs, or a model that computes its loss itself",
    )


def parameter_checksums(objective: Objective) -> dict[str, int]:
    """The checksum of every parameter, by the user's name."""
    named = objective.named_parameters()
    return {name.removeprefix(MODEL_PREFIX): int(parameter_checksum(p.contiguous())) for name, p in named}
