"""The verbs as functions, for scripts, torchrun and notebooks."""

from meshwright.api.generation import sample
from meshwright.api.host_checks import preflight
from meshwright.api.prediction import plan, report, simulate
from meshwright.api.proof import prove
from meshwright.api.training import Result, train, train_as_rank, train_with_fork_server
from meshwright.generate.settings import Sample
from meshwright.launch.engines.kubernetes import launch_kubernetes
from meshwright.launch.engines.ray_script import launch_ray
from meshwright.launch.engines.slurm import launch_slurm

__all__ = [
    "Result",
    "Sample",
    "launch_kubernetes",
    "launch_ray",
    "launch_slurm",
    "plan",
    "preflight",
    "prove",
    "report",
    "sample",
    "simulate",
    "train",
    "train_as_rank",
    "train_with_fork_server",
]
