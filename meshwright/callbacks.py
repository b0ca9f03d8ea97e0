"""The callbacks that Meshwright brings, and the class to inherit from for your own."""

from meshwright.trainer.callbacks.best_checkpoint import KeepBestCheckpoint
from meshwright.trainer.callbacks.callback import Callback, RunContext
from meshwright.trainer.callbacks.early_stopping import EarlyStopping
from meshwright.trainer.callbacks.mlflow import MLflow
from meshwright.trainer.callbacks.tensorboard import TensorBoard
from meshwright.trainer.callbacks.wandb import WeightsAndBiases

__all__ = [
    "Callback",
    "EarlyStopping",
    "KeepBestCheckpoint",
    "MLflow",
    "RunContext",
    "TensorBoard",
    "WeightsAndBiases",
]
