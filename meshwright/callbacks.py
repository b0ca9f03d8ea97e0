"""The callbacks that Meshwright brings, and the class to inherit from for your own."""

from meshwright.core.trainer.callbacks.best_checkpoint import KeepBestCheckpoint
from meshwright.core.trainer.callbacks.callback import Callback, RunContext
from meshwright.core.trainer.callbacks.early_stopping import EarlyStopping
from meshwright.core.trainer.callbacks.mlflow import MLflow
from meshwright.core.trainer.callbacks.tensorboard import TensorBoard
from meshwright.core.trainer.callbacks.wandb import WeightsAndBiases

__all__ = [
    "Callback",
    "EarlyStopping",
    "KeepBestCheckpoint",
    "MLflow",
    "RunContext",
    "TensorBoard",
    "WeightsAndBiases",
]
