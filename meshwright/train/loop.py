"""A rank's whole life in a run: build, then step after step, recording each, evaluating at its own cadence."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from meshwright.config import Batch, RunConfig
from meshwright.data.contract import stream_of
from meshwright.data.loader import Loader
from meshwright.data.source import Concatenated, Source
from meshwright.data.stream import Stream
from meshwright.errors import Stopped
from meshwright.layout import Layout
from meshwright.model.init import build
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.world import World
from meshwright.record.events import Event, EventLog
from meshwright.record.folder import RunFolder
from meshwright.train.evaluate import Evaluation
from meshwright.train.identity import describe, enter
from meshwright.train.ledger import Ledger, number
from meshwright.train.objective import Loss, Objective
from meshwright.train.optimizer import Optimizer, learning_rate
from meshwright.train.precision import Precision
from meshwright.train.step import Step


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given."""

    config: RunConfig
    batch: Batch
    layout: Layout
    sources: list[Source]
    folder: RunFolder
    attempt: int = 0
    model: nn.Module | None = None  # a user's own; None is the decoder of the config
    loss: Loss | None = None
    listener: Callable[[Event], None] | None = None


@dataclass
class Summary:
    """How a run ended."""

    steps: int
    loss: float | None
    skipped: int
    parameters_digest: str
    evaluations: list[tuple[int, float]] = field(default_factory=list)


def train_rank(job: Job, world: World) -> Summary:
    """The whole run on this rank."""
    training = Training(job, world)
    try:
        while training.done < job.config.steps:
            training.advance()
            if training.evaluation_is_due():
                training.evaluate()
    except Stopped:
        training.ledger.settle()  # the last whole step is on record
        raise
    return training.finish()


class Training:
    """One rank's parts of a run. `advance` makes the next step; `done` counts them."""

    def __init__(self, job: Job, world: World) -> None:
        config = job.config
        self.job, self.world, self.done = job, world, 0
        signal_seen = watch_signals()
        decide_bits(config, world)
        self.precision = Precision(config.precision, world.device)
        self.model = build_model(job, self.precision, world)
        stream = stream_of(config, job.sources)
        if world.rank == 0:
            enter(job.folder, config, describe(config, job.sources, stream, job.model))
        listener = job.listener if world.rank == 0 else None
        self.log = EventLog(job.folder.events(world.rank), job.attempt, world.rank, listener)
        self.log.write("start", **start_facts(job, self.model, stream, world))
        self.ledger = Ledger(config, job.batch, world, self.model, self.precision, self.log)
        coordinate = job.layout.data_coordinate(world.rank)
        source = Concatenated(job.sources)
        self.batches = Loader(source, stream, job.batch, coordinate, config.data).steps(0, config.steps)
        self.evaluation = Evaluation(source, stream, config.eval.samples, job.batch, coordinate, config.data)
        self.step = Step(
            Replicated(self.model, config.replicate, world),
            Optimizer(self.model, config.optimizer),
            self.precision,
            world,
            seed=config.seed,
            coordinate=coordinate,
            quarantine=config.data.on_bad_sample == "quarantine",
            signal_seen=signal_seen,
        )

    def advance(self) -> None:
        config = self.job.config
        lr = learning_rate(self.done, config.steps, config.optimizer.lr, config.schedule)
        self.ledger.take(self.step.run(self.done, lr, self.batches))
        self.done += 1

    def evaluation_is_due(self) -> bool:
        cadence = self.job.config.eval
        if not (cadence.every and self.evaluation.samples):
            return False
        return self.done % cadence.every == 0 or self.done == self.job.config.steps

    def evaluate(self) -> None:
        self.ledger.settle()
        self.ledger.evaluated(self.done - 1, *self.evaluation.run(self.model, self.precision, self.world))

    def finish(self) -> Summary:
        self.ledger.settle()
        digest = parameters_digest(self.model) if self.world.rank == 0 else ""
        summary = Summary(self.ledger.steps, self.ledger.loss, self.ledger.skipped, digest, self.ledger.evaluations)
        self.log.write("end", **asdict(summary) | {"loss": number(summary.loss)})
        self.log.close()
        if isinstance(self.model, Objective) and (self.world.rank == 0 or not in_shared_memory(self.job)):
            give_back(self.model, self.job)
        return summary


def build_model(job: Job, precision: Precision, world: World) -> nn.Module:
    if job.model is None or job.loss is None:
        return build(job.config.model, job.config.seed, precision.weights, world.device)
    # The user's modules may live in memory that all ranks share: train on copies, and give the weights back at the end.
    model, loss = copy.deepcopy(job.model), copy.deepcopy(job.loss) if isinstance(job.loss, nn.Module) else job.loss
    return Objective(model.to(world.device, precision.weights), loss).to(world.device)


def in_shared_memory(job: Job) -> bool:
    """Forked ranks see the launching process's modules; ranks that torchrun started have each their own."""
    return any(tensor.is_shared() for module in user_modules(job) for tensor in module.state_dict().values())


def user_modules(job: Job) -> list[nn.Module]:
    """What a user brought that has weights to train."""
    return [module for module in (job.model, job.loss) if isinstance(module, nn.Module)]


@torch.no_grad()
def give_back(trained: Objective, job: Job) -> None:
    for mine, theirs in zip((trained.model, trained.loss), user_modules(job), strict=False):
        for name, value in theirs.state_dict().items():
            value.copy_(mine.state_dict()[name])


def decide_bits(config: RunConfig, world: World) -> None:
    """The process-wide switches that decide bits."""
    deterministic = config.precision.deterministic
    if deterministic is None:
        deterministic = world.device.type == "cpu"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(config.launch.threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Meant for finding bugs: it would write every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def watch_signals() -> Callable[[], int]:
    """Signals do not end a step: they are asked for at the start of the next, and all ranks hear of them together."""
    seen = [0]

    def note(number: int, _frame: object) -> None:
        seen[0] = number

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return lambda: seen[0]


def start_facts(job: Job, model: nn.Module, stream: Stream, world: World) -> Event:
    return {
        "steps": job.config.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "decoder": job.model is None,
        "layout": str(job.layout),
        "ranks": world.size,
        "batch": str(job.batch),
        "device": device_name(world.device),
        "precision": job.config.precision.compute,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sources": [s.name for s in job.sources],
        "samples": stream.samples,
        "held_out": sum(part.held_out for part in stream.parts),
        "epoch_steps": round(sum(part.trained for part in stream.parts) / stream.global_batch, 2),
        "time": time.time(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@torch.no_grad()
def parameters_digest(model: nn.Module) -> str:
    """One digest of every parameter's name and bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0" + parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
