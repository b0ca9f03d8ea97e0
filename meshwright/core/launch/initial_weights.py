"""Opens the folder that a run takes its initial weights from, before its ranks start."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import Tensor

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.config import RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.trainer.custom_model import CustomModel, saved_tensors
from meshwright.core.trainer.identity import INITIAL_WEIGHTS, read_identity
from meshwright.core.weights.initial import InitialWeights
from meshwright.core.weights.reader import WeightFolder, module_tensors
from meshwright.errors import ConfigError


def open_initial_weights(config: RunConfig, run: RunFolder, custom: CustomModel | None) -> InitialWeights | None:
    """Checks every tensor of `init_from` and reads every byte for its digest. A run that has a checkpoint does not need
    the folder any more: if it is gone, the digest is that of the run's record. Low-rank adaptation always needs it: its
    checkpoints do not contain the frozen parameters.
    """
    if not config.init_from:
        return None
    if config.lora.enabled and not os.path.lexists(config.init_from):
        raise ConfigError(
            f"init_from = {config.init_from} does not exist, and checkpoints of low-rank adaptation do not contain the "
            "frozen parameters",
            "try to restore the folder, or meshwright checkpoint import DIR --run RUN, which copies it to the run",
        )
    if not os.path.lexists(config.init_from) and os.path.lexists(run.identity_file):
        recorded = read_identity(run)["identity"].get(INITIAL_WEIGHTS)
        if isinstance(recorded, str) and list_published(open_run_store(run)):
            return InitialWeights(recorded, None)
    folder = open_folder(config, custom)
    return InitialWeights(folder.digest, folder)


def open_folder(config: RunConfig, custom: CustomModel | None) -> WeightFolder:
    if custom is None:
        return WeightFolder(config.init_from, config.model)
    return WeightFolder(config.init_from, tensors=module_tensors(saved_tensors(custom.module)))


def with_init_from_folder(config: RunConfig, custom: CustomModel) -> CustomModel:
    """The custom model with an `init` that reads the folder, if the model is on the meta device and has none."""
    if not config.init_from or custom.init is not None or not custom.on_meta():
        return custom
    folder = open_folder(config, custom)

    def init(name: str, tensor: Tensor) -> None:
        tensor.copy_(folder.read(name, (0,) * tensor.ndim, tensor.shape))

    return replace(custom, init=init)
