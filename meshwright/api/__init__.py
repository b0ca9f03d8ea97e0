"""The verbs as functions, for scripts, torchrun and notebooks."""

from meshwright.api.prediction import plan, report, simulate
from meshwright.api.proof import prove
from meshwright.api.training import Result, train, train_as_rank, train_with_fork_server

__all__ = ["Result", "plan", "prove", "report", "simulate", "train", "train_as_rank", "train_with_fork_server"]
