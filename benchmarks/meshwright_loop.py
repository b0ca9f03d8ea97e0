"""Meshwright's training loop as a benchmark contender: the trainer of a rank, a few steps at a time."""

from __future__ import annotations

from benchmarks.peer_components import RunSteps
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import Training


def make_loop(job: Job, world: World) -> RunSteps:
    """The same `Training` object that `train_rank` runs; every step is recorded in the run folder."""
    training = Training(job, world)

    def run(steps: int) -> float:
        for _ in range(steps):
            training.run_step()
        training.recorder.flush()
        assert training.recorder.loss is not None
        return training.recorder.loss

    return run
