"""Checks a custom model on its first samples in a process of its own, which can be ended and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import rounds_weights
from meshwright.base.records.failures import RanksFailed
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.core.data.source import Source, find_structure
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.first_batch.check import FirstBatch, check_first_batch
from meshwright.core.trainer.first_batch.model_notes import dtype_notes, short_list
from meshwright.errors import ConfigError


def prepare_custom_model(custom: CustomModel, source: Source, config: RunConfig, layout: Layout) -> CustomModel:
    """Returns the custom model with the structure of its batches, how their targets are counted, and notes. Raises
    ConfigError if its loss is not a sum over samples.
    """
    custom = replace(custom, batch=find_structure(source, custom.collate))
    found = check_in_process(run_check, "first batch", config.launch.hang_timeout, custom, source, config)
    assert isinstance(found, FirstBatch)
    if found.unused and uses_ddp(layout) and not (config.ddp.find_unused_parameters or config.ddp.static_graph):
        more = f" and {len(found.unused) - 1} more" if len(found.unused) > 1 else ""
        raise ConfigError(
            f"{found.unused[0]}{more} got no gradient from the first batch, and DDP waits for one of every parameter",
            "try ddp.find_unused_parameters = true, or requires_grad_(False) for parameters that are never used",
        )
    require_kept_changes(found.changed, config, layout)
    custom = found.apply(custom)
    return replace(custom, notes=(*custom.notes, *dtype_notes(custom.module, config.precision)))


def require_kept_changes(changed: tuple[str, ...], config: RunConfig, layout: Layout) -> None:
    """Raises a ConfigError if forward changes parameters, and ranks compute with copies of their shards."""
    if not changed or (not uses_fsdp(layout) and layout.tensor * layout.pipeline == 1 and not rounds_weights(config)):
        return
    settings = (
        "precision.weights = fp32" if rounds_weights(config) else "layout.shard = none and layout.replicate alone"
    )
    raise ConfigError(
        f"forward changes {short_list(changed)} without the optimizer, as a momentum teacher does, and the change is "
        f"lost: ranks of the layout {layout} compute with copies of their shards or of master weights",
        f"try {settings}",
    )


def check_in_process(check: Callable[..., Any], what: str, timeout: float, *args: Any) -> Any:
    """Runs a check of a user's model in a process of its own, and returns its value or raises its error."""
    try:
        return run_ranks(check, 1, *args, timeout=timeout)[0]
    except RanksFailed as failed:
        if failed.first.error_type == "Hang":
            raise ConfigError(
                f"the model did not finish its {what} within launch.hang_timeout = {timeout:g} s",
                "try the model on one batch outside of Meshwright, or a longer launch.hang_timeout",
            ) from None
        raise failed.cause() from None


def run_check(_world: Any, custom: CustomModel, source: Source, config: RunConfig) -> FirstBatch:
    torch.set_num_threads(config.launch.threads)
    return check_first_batch(custom, source, config.seed, config)
