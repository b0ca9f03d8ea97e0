"""The callbacks of a run: those that its settings ask for, then those of the user. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.core.trainer.callbacks.best_checkpoint import KeepBestCheckpoint
from meshwright.core.trainer.callbacks.callback import Callback
from meshwright.core.trainer.callbacks.early_stopping import EarlyStopping
from meshwright.core.trainer.callbacks.mlflow import MLflow
from meshwright.core.trainer.callbacks.tensorboard import TensorBoard
from meshwright.core.trainer.callbacks.wandb import WeightsAndBiases
from meshwright.errors import ConfigError


def run_callbacks(config: RunConfig, given: Sequence[Any], custom_model: bool = True) -> tuple[Callback, ...]:
    """All callbacks of a run. Raises ConfigError if one of them cannot work. The evaluations of a built-in model have
    no metric besides the loss.
    """
    metrics = {
        "early_stopping.metric": config.early_stopping.metric,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for setting, metric in metrics.items():
        if not custom_model and metric not in ("", "loss"):
            raise ConfigError(f"{setting} = {metric}, and a built-in model has no such metric", "expected loss")
    for value in given:
        if not isinstance(value, Callback):
            raise ConfigError(
                f"callbacks contains {type(value).__name__}, which is not a Callback",
                "expected objects of a class that inherits from meshwright.Callback",
            )
    return (*configured_callbacks(config), *given)


def configured_callbacks(config: RunConfig) -> Iterator[Callback]:
    """The callbacks that the settings ask for."""
    stopping, trackers = config.early_stopping, config.trackers
    if stopping.patience:
        require_evaluations(config, f"early_stopping.patience = {stopping.patience}")
        yield EarlyStopping(stopping.patience, stopping.metric, stopping.mode, stopping.margin)
    if metric := config.checkpoint.keep_best:
        require_evaluations(config, f"checkpoint.keep_best = {metric}")
        if config.checkpoint.mode == "off":
            raise ConfigError(
                f"checkpoint.keep_best = {metric} and checkpoint.mode = off", "expected checkpoint.mode = async or sync"
            )
        yield KeepBestCheckpoint(metric, config.checkpoint.best)
    if trackers.tensorboard:
        require_package("tensorboard", "trackers.tensorboard")
        yield TensorBoard(every=trackers.every)
    if trackers.wandb != "off":
        require_package("wandb", "trackers.wandb")
        yield WeightsAndBiases(trackers.project, trackers.wandb, trackers.every)
    if trackers.mlflow:
        require_package("mlflow", "trackers.mlflow")
        yield MLflow(trackers.mlflow, trackers.project, trackers.every)


def require_evaluations(config: RunConfig, setting: str) -> None:
    if not (config.eval.every and config.eval.holdout):
        raise ConfigError(
            f"{setting} needs evaluations, and the run has none", "expected eval.every and eval.holdout above 0"
        )


def require_package(name: str, setting: str) -> None:
    if find_spec(name) is None:
        raise ConfigError(f"{setting} needs the package {name}", f"try pip install 'meshwright[{name}]'")
