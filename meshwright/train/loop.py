"""A rank's whole life in a run: build, then step after step, recording each, evaluating at its own cadence."""

from __future__ import annotations

import copy
import hashlib
import resource
import signal
import sys
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
from meshwright.errors import DataError, NumericsError, PeerError
from meshwright.layout import Layout
from meshwright.model.init import build
from meshwright.parallel.replicate import Replicated, wire_bytes
from meshwright.parallel.world import World
from meshwright.record.events import Event, EventLog
from meshwright.record.folder import RunFolder
from meshwright.train.evaluate import Evaluation
from meshwright.train.identity import describe, enter
from meshwright.train.numerics import NoiseScale, first_nonfinite
from meshwright.train.objective import Loss, Objective
from meshwright.train.optimizer import Optimizer, learning_rate
from meshwright.train.precision import Precision
from meshwright.train.step import Outcome, Step


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given."""

    config: RunConfig
    batch: Batch
    layout: Layout
    sources: list[Source]
    folder: RunFolder
    attempt: int
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
    config = job.config
    seen = watch_signals()
    settle(config)
    precision = Precision(config.precision, world.device)
    model = build_model(job, precision, world)
    coordinate = job.layout.data_coordinate(world.rank)
    source = Concatenated(job.sources)
    stream = stream_of(config, job.sources)
    if world.rank == 0:
        enter(job.folder, config, describe(config, job.sources, stream, job.model))
    log = EventLog(job.folder.events(world.rank), job.attempt, world.rank, job.listener if world.rank == 0 else None)
    log.write("start", **start_facts(job, model, stream, world))
    replicated = Replicated(model, config.replicate, world)
    optimizer = Optimizer(model, config.optimizer)
    step = Step(
        model,
        replicated,
        optimizer,
        precision,
        world,
        seed=config.seed,
        coordinate=coordinate,
        quarantine=config.data.on_bad_sample == "quarantine",
        signal_seen=seen,
    )
    batches = Loader(source, stream, job.batch, coordinate, config.data).steps(0, config.steps)
    evaluation = None
    if config.eval.every and config.eval.holdout:
        evaluation = Evaluation(source, stream, config.eval.samples, job.batch, coordinate, config.data)
    ledger = Ledger(job, world, model, precision, log)
    for number in range(config.steps):
        lr = learning_rate(number, config.steps, config.optimizer.lr, config.schedule)
        ledger.take(step.run(number, lr, batches))
        if evaluation is not None and ((number + 1) % config.eval.every == 0 or number + 1 == config.steps):
            ledger.settle()
            ledger.evaluated(number, *evaluation.run(model, precision, world))
    ledger.settle()
    summary = ledger.summary(parameters_digest(model) if world.rank == 0 else "")
    log.write("end", **asdict(summary))
    log.close()
    if job.model is not None and (world.rank == 0 or not in_shared_memory(job.model)):
        give_back(model, job.model)
    return summary


class Ledger:
    """Turns outcomes into records and applies the policies. On CUDA an outcome is read one step late, so that no step
    waits for the device.
    """

    def __init__(self, job: Job, world: World, model: nn.Module, precision: Precision, log: EventLog) -> None:
        self.job, self.world, self.model, self.precision, self.log = job, world, model, precision, log
        self.noise = NoiseScale(job.batch.global_, job.batch.replicas)
        self.waiting: Outcome | None = None
        self.bad_samples = self.skipped = self.in_a_row = self.steps = 0
        self.loss: float | None = None
        self.evaluations: list[tuple[int, float]] = []

    def take(self, outcome: Outcome) -> None:
        self.settle()
        self.waiting = outcome
        if self.world.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Records the outcome that waits, if one does."""
        outcome, self.waiting = self.waiting, None
        if outcome is None:
            return
        outcome.clock.wait()
        loss, norm, local_square, finite, scale = outcome.numbers.tolist()
        self.steps += 1
        self.loss = loss
        traffic, phases = outcome.traffic, outcome.clock.seconds()
        noise = self.noise.update(norm, local_square) if finite else None
        extra = {"skipped": True} if not finite else {}
        if self.precision.scaler is not None:
            extra["loss_scale"] = scale
        self.log.write(
            "step",
            step=outcome.step,
            loss=number(loss),
            grad_norm=number(norm),
            lr=outcome.lr,
            tokens=outcome.agreement.tokens,
            samples=self.job.batch.global_,
            phases=phases,
            seconds=round(sum(phases.values()), 7),
            communication={
                "buckets": traffic.buckets,
                "message_bytes": traffic.message_bytes,
                "wire_bytes": wire_bytes(traffic.message_bytes, self.world.size),
                "exposed_seconds": phases["sync"],
            },
            noise_scale=number(noise),
            memory=memory_bytes(self.world.device),
            **extra,
        )
        self._bad_samples(outcome)
        self._nonfinite(outcome, loss, bool(finite))

    def evaluated(self, step: int, loss: float, tokens: int, bad: str) -> None:
        if bad and self.job.config.data.on_bad_sample == "stop":
            raise DataError(
                f"rank {self.world.rank} step {step}, evaluation: {bad}",
                'mend the sample, or set data.on_bad_sample = "quarantine"',
            )
        self.log.write("eval", step=step, loss=number(loss), tokens=tokens)
        self.evaluations.append((step, loss))

    def summary(self, digest: str) -> Summary:
        return Summary(self.steps, self.loss, self.skipped, digest, self.evaluations)

    def _bad_samples(self, outcome: Outcome) -> None:
        for batch in outcome.batches:
            for bad in batch.bad:
                self.log.write("bad_sample", step=outcome.step, **asdict(bad))
        self.bad_samples += outcome.agreement.bad_samples  # the same sum on every rank
        budget = self.job.config.data.bad_sample_budget
        if self.bad_samples > budget:
            raise DataError(
                f"rank {self.world.rank} step {outcome.step}: {self.bad_samples} samples could not be decoded, "
                f"data.bad_sample_budget = {budget}",
                "see the bad_sample events for each of them",
            )

    def _nonfinite(self, outcome: Outcome, loss: float, finite: bool) -> None:
        if finite:
            self.in_a_row = 0
            return
        self.skipped += 1
        overflow = self.precision.scaler is not None and loss == loss and abs(loss) != float("inf")
        if overflow:  # fp16 found its scale too high: the scaler's business, not a fault
            return
        self.in_a_row += 1
        where = first_nonfinite(self.model, outcome.batches, self.world.device, self.precision.autocast)
        self.log.write("nonfinite", step=outcome.step, loss=number(loss), module=where)
        numerics = self.job.config.numerics
        if numerics.on_nonfinite == "skip" and self.in_a_row <= numerics.skip_budget:
            return
        what = f"rank {self.world.rank} step {outcome.step}: loss {loss} or its gradient is not finite"
        named = self.world.control_sum([where is not None]).wait()[0]
        if where is None and named:
            raise PeerError(f"{what}, first on another rank")
        raise NumericsError(
            f"{what}, first in {where or 'the sum over ranks'}",
            "lower optimizer.lr, look at the samples with `meshwright data show`, or skip such steps "
            '(numerics.on_nonfinite = "skip")',
        )


def build_model(job: Job, precision: Precision, world: World) -> nn.Module:
    if job.model is None:
        return build(job.config.model, job.config.seed, precision.weights, world.device)
    # The user's module may live in memory that all ranks share: train on a copy, and give the weights back at the end.
    assert job.loss is not None
    mine = copy.deepcopy(job.model).to(world.device, precision.weights)
    return Objective(mine, job.loss).to(world.device)


def in_shared_memory(model: nn.Module) -> bool:
    """Forked ranks see the launching process's module; ranks that torchrun started have each their own."""
    return any(p.is_shared() for p in model.parameters())


@torch.no_grad()
def give_back(trained: nn.Module, user_model: nn.Module) -> None:
    assert isinstance(trained, Objective)
    for mine, theirs in zip(trained.model.state_dict().values(), user_model.state_dict().values(), strict=True):
        theirs.copy_(mine)


def settle(config: RunConfig) -> None:
    """The process-wide switches that decide bits."""
    torch.set_num_threads(config.launch.threads)
    torch.use_deterministic_algorithms(config.precision.deterministic, warn_only=True)
    torch.manual_seed(config.seed)


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


def memory_bytes(device: torch.device) -> int:
    """The most this rank has held so far: of device memory on CUDA, of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def number(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null stands for both."""
    return value if value is not None and abs(value) < float("inf") else None


@torch.no_grad()
def parameters_digest(model: nn.Module) -> str:
    """One digest of every parameter's name and bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0" + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
