"""Meshwright's side: the parts of a training rank, driven a few steps at a time."""

from __future__ import annotations

from benchmarks.ordinary import Run
from meshwright.data.contract import stream_of
from meshwright.data.loader import Loader
from meshwright.data.source import Concatenated
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.world import World
from meshwright.record.events import EventLog
from meshwright.train.loop import Job, Ledger, build_model, start_facts, watch_signals
from meshwright.train.optimizer import Optimizer, learning_rate
from meshwright.train.precision import Precision
from meshwright.train.step import Step


def contender(job: Job, world: World) -> Run:
    """Built as `train_rank` builds them, in its order; every step is recorded in the run folder."""
    config = job.config
    seen = watch_signals()
    precision = Precision(config.precision, world.device)
    model = build_model(job, precision, world)
    coordinate = job.layout.data_coordinate(world.rank)
    source, stream = Concatenated(job.sources), stream_of(config, job.sources)
    log = EventLog(job.folder.events(world.rank), job.attempt, world.rank)
    log.write("start", **start_facts(job, model, stream, world))
    step = Step(
        model,
        Replicated(model, config.replicate, world),
        Optimizer(model, config.optimizer),
        precision,
        world,
        seed=config.seed,
        coordinate=coordinate,
        quarantine=config.data.on_bad_sample == "quarantine",
        signal_seen=seen,
    )
    batches = Loader(source, stream, job.batch, coordinate, config.data).steps(0, config.steps)
    ledger = Ledger(job, world, model, precision, log)
    done = 0

    def run(steps: int) -> float:
        nonlocal done
        for number in range(done, done + steps):
            lr = learning_rate(number, config.steps, config.optimizer.lr, config.schedule)
            ledger.take(step.run(number, lr, batches))
        ledger.settle()
        done += steps
        assert ledger.loss is not None
        return ledger.loss

    return run
