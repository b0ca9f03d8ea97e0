"""Meshwright's side: the parts of a training rank, driven a few steps at a time."""

from __future__ import annotations

from benchmarks.ordinary import Run
from meshwright.parallel.world import World
from meshwright.trainer.loop import Job, Training


def contender(job: Job, world: World) -> Run:
    """The very object that `train_rank` drives; every step is recorded in the run folder."""
    training = Training(job, world)

    def run(steps: int) -> float:
        for _ in range(steps):
            training.run_step()
        training.recorder.flush()
        assert training.recorder.loss is not None
        return training.recorder.loss

    return run
