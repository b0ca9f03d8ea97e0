"""A rank's whole life in a run: build, then step after step, recording each, evaluating at its own cadence."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import nn

from meshwright import faults
from meshwright.checkpoint.listing import RunLineage, list_published, open_run_store
from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.saver import CheckpointMetadata, CheckpointSaver, SaveResult
from meshwright.checkpoint.state import collect_state, digest_parallel_parameters
from meshwright.checkpoint.verify import Damage
from meshwright.config import Batch, RunConfig
from meshwright.data.loader import Loader
from meshwright.data.sample_lookup import build_stream
from meshwright.data.source import ConcatenatedSource, Source
from meshwright.errors import CheckpointError, StoppedBySignal
from meshwright.io import read_json
from meshwright.models.init import build_on_meta, init_shard
from meshwright.optim.adamw import AdamW
from meshwright.parallel.data_parallel.replica_check import compare_replicas
from meshwright.parallel.local_shard import LocalShard, full_tensor, local_shard
from meshwright.parallel.parallel_model import ParallelModel, router_biases
from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.tensor_parallel import decoder_parallel_spec
from meshwright.parallel.world import World
from meshwright.store.interface import Store
from meshwright.telemetry.events import Event, EventLog
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.layout import Layout
from meshwright.trainer.evaluate import Evaluation
from meshwright.trainer.identity import build_identity, claim_run_folder
from meshwright.trainer.plan_recorder import PlanRecorder
from meshwright.trainer.precision import Precision
from meshwright.trainer.resume import ResumeState
from meshwright.trainer.signals import SignalWatch
from meshwright.trainer.start_record import start_record
from meshwright.trainer.step import Step, StepContext
from meshwright.trainer.step_counters import count_step
from meshwright.trainer.step_recorder import StepRecorder, finite_or_none
from meshwright.trainer.user_loss import LossFunction, Objective


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given."""

    config: RunConfig
    batch: Batch
    layout: Layout
    sources: list[Source]
    folder: RunFolder
    attempt: int = 0
    restart: int = 0
    """how often this job has been restarted: faults know by it whether they have struck"""
    fork: int = 0
    """the attempt with which this job began, where it is to begin a new timeline: its restarts stay on that one"""
    fallback: bool = True
    watched: bool = True
    """whether a supervisor of ours looks on"""
    model: nn.Module | None = None  # a user's own; None is the decoder of the config
    loss: LossFunction | None = None
    parallel_spec: ParallelSpec | None = None
    """what a layout must know of a user's own model"""
    cluster: str | None = None
    """the machine that its seconds are predicted for (default: this one, where it was measured)"""
    listener: Callable[[Event], None] | None = None

    def as_attempt(self, attempt: int, restart: int, fork: bool) -> Job:
        """This job's next attempt. A fork is known by the attempt that the job began with, so that it is made once."""
        return replace(self, attempt=attempt, restart=restart, fork=attempt - restart if fork else 0)


@dataclass
class RunSummary:
    """How a run ended."""

    steps: int
    loss: float | None
    skipped: int
    parameters_digest: str
    evaluations: list[tuple[int, float]] = field(default_factory=list)


def train_rank(job: Job, world: World) -> RunSummary:
    """The whole run on this rank, from wherever its newest checkpoint stands."""
    faults.arm(world.rank, job.restart)
    faults.fail_point("start.begin", -1)
    training = Training(job, world)
    try:
        while training.done < job.config.steps:
            training.advance()
            if training.evaluation_is_due():
                training.evaluate()
            training.keep()
    except StoppedBySignal:
        training.parallel_model.reshard()
        training.ledger.settle()  # the last whole step is on record
        training.save()
        raise
    finally:
        training.signals.close()
    return training.finish()


class Training:
    """One rank's parts of a run. `advance` makes the next step; `done` counts them."""

    def __init__(self, job: Job, world: World) -> None:
        config = job.config
        self.job, self.world = job, world
        self.signals = SignalWatch(world.heartbeat)
        set_determinism(config, world)
        self.precision = Precision(config.precision, world.device)
        self.parallel_model = build_parallel_model(job, self.precision, world)
        self.model = self.parallel_model.module
        self.stream = build_stream(config, job.sources)
        identity = build_identity(config, job.sources, self.stream, job.model)
        lineage = self._enter(identity)
        listener = job.listener if world.rank == 0 else None
        self.log = EventLog(job.folder.events(world.rank), job.attempt, world.rank, listener)
        self.log.write("start", **start_record(job, self.parallel_model, self.stream, world))
        self.foresight = PlanRecorder(job, world)
        self.ledger = StepRecorder(config, job.batch, world, self.parallel_model, self.precision, self.log)
        self.resume = ResumeState(config, job.batch, job.layout, self.stream, identity["identity"], lineage, world)
        self.parameters = self.parallel_model.parameters()
        self.optimizer = AdamW(self.parameters, config.optimizer, job.layout, world, config.optimizer.cpu_offload)
        store = open_run_store(job.folder)
        self.state = partial(collect_state, self.model, self.parameters, self.optimizer.moments())
        self.saver = CheckpointSaver(
            config.checkpoint,
            store,
            world,
            lineage,
            job.attempt,
            self.resume.facts(),
            self.state,
            config.launch.hang_timeout,
            job.layout,
        )
        context = StepContext.for_rank(config, job.layout, world, self.parallel_model, self.optimizer, self.precision)
        context.signal_seen = self.signals.seen
        if world.rank == 0:
            context.save_state = self.saver.poll
        self.step = Step(context)
        coordinate = context.data_coordinate
        source = ConcatenatedSource(job.sources)
        loader = Loader(source, self.stream, job.batch, coordinate, config.data)
        self.evaluation = Evaluation(source, self.stream, config.eval.samples, job.batch, coordinate)
        self.step.warmup_backward(loader.first)
        self.done = self._restore(store, lineage)
        self.began = self.done
        self.batches = loader.steps(self.done, config.steps)

    def _enter(self, identity: Event) -> RunLineage:
        """Rank 0 writes down which run this is, or refuses; the other ranks hear which."""
        job, store = self.job, open_run_store(self.job.folder)
        if self.world.rank == 0:
            newest = next((entry.step for entry in list_published(store)), -1)
            claim_run_folder(job.folder, job.config, identity, job.fork, newest)
        told = self.world.broadcast_object(
            read_json(job.folder.identity_file) if self.world.rank == 0 else None, "lineage"
        )
        return RunLineage.from_identity(told)

    def _restore(self, store: Store, lineage: RunLineage) -> int:
        """Goes on from the newest intact checkpoint; the steps that it has done."""

        def say(name: str, found: list[Damage]) -> None:
            self.log.write("damaged", checkpoint=name, damage=[damage.to_json() for damage in found])

        found = restore(
            store, self.world, lineage, self.state(), self.resume.check, fallback=self.job.fallback, on_damaged=say
        )
        if found is None:
            return 0
        manifest = found.manifest
        self.optimizer.refresh_offloaded()
        self.parallel_model.after_update()
        self.resume.apply(manifest, self.ledger, self.precision)
        self.saver.continue_from(manifest)
        self.log.write(
            "restored",
            step=manifest.step,
            checkpoint=found.name,
            seconds=round(found.seconds, 3),
            changes=self.resume.changes(manifest),
        )
        return manifest.step

    def advance(self) -> None:
        lr = self.resume.rate(self.done)
        if self.counting_is_due():
            with count_step(self.parallel_model, self.optimizer) as counted:
                outcome = self.step.run(self.done, lr, self.batches, counted.enter)
            outcome.counted = True
            self.ledger.take(outcome)
            self.log.write("counters", step=self.done, **counted.to_json())
            self.foresight.counted(counted.memory.peak_total)
        else:
            outcome = self.step.run(self.done, lr, self.batches)
            self.ledger.take(outcome)
        faults.fail_point("step.updated", self.done)
        self.done += 1
        self.agreed = outcome.control
        every = self.job.config.numerics.compare_every
        if every and self.done % every == 0 and self.world.size > 1:
            alike = self.parameters | dict(router_biases(self.model))
            blocks = {name: local_shard(tensor) for name, tensor in alike.items()}
            compare_replicas(blocks, self.job.layout, self.world, self.done - 1)

    def counting_is_due(self) -> bool:
        """The second step of every attempt, when everything has been made that is made once; then at a cadence. Never
        where blocks are compiled: under a ledger they would run as they are written, with other last bits.
        """
        every = self.job.config.count_bytes_every
        return (
            every > 0
            and not self.job.config.compile.enabled
            and (self.done == self.began + 1 or (self.done > self.began and self.done % every == 0))
        )

    def evaluation_is_due(self) -> bool:
        cadence = self.job.config.eval
        if not (cadence.every and self.evaluation.samples):
            return False
        return self.done % cadence.every == 0 or self.done == self.job.config.steps

    def evaluate(self) -> None:
        self.world.heartbeat.enter("evaluate")
        faults.fail_point("evaluate", self.done - 1)
        self.ledger.settle()
        found = self.evaluation.run(
            self.parallel_model,
            self.precision,
            self.world,
            self.step.context.counts_tokens,
            self.step.context.reports_loss,
        )
        self.ledger.evaluated(self.done - 1, *found)

    def notes(self) -> CheckpointMetadata:
        return self.resume.notes(self.done, self.ledger, self.precision, self.optimizer.used_parameters)

    def keep(self) -> None:
        """Saves where all ranks agreed to, and says what became of the save before."""
        if self.agreed.save_due:
            self.ledger.settle()
            self._tell(self.saver.save(self.notes()))
        elif self.agreed.save_finished:
            self._tell(self.saver.wait())
        elif said := self.saver.stall_warning():
            self.log.write("save_failed", step=self.done, message=said)

    def save(self) -> None:
        """A checkpoint of this very step, before anything else happens."""
        self.world.heartbeat.enter("save")
        self._tell(self.saver.wait())
        if self.saver.newest_step != self.done and self.job.config.checkpoint.mode != "off":
            self._tell(self.saver.save(self.notes(), wait=True), must=True)

    def _tell(self, saves: list[SaveResult], must: bool = False) -> None:
        for saved in saves:
            if saved.error is None:
                self.log.write("checkpoint", **saved.to_json())
                continue
            self.log.write("save_failed", step=saved.step, message=str(saved.error))
            stops = must or self.job.config.checkpoint.on_failure == "stop"
            if stops or not isinstance(saved.error, CheckpointError):
                raise saved.error

    def finish(self) -> RunSummary:
        faults.fail_point("end", self.done)
        self.ledger.settle()
        self.save()
        self.world.heartbeat.enter("end")
        self.saver.close()
        digest = digest_parallel_parameters(
            self.parameters, self.job.layout, self.world, self.parallel_model.forward_is_collective
        )
        summary = RunSummary(self.done, self.ledger.loss, self.ledger.skipped, digest, self.ledger.evaluations)
        self.foresight.end(list(self.ledger.paces), self.began, self.log)
        complete = self.began == self.done > 0
        self.log.write("end", **asdict(summary) | {"loss": finite_or_none(summary.loss), "was_complete": complete})
        self.log.close()
        if isinstance(self.model, Objective):
            copy_trained_weights(self.model, self.job, self.world.rank == 0 or not self.job.watched)
        return summary


def build_parallel_model(job: Job, precision: Precision, world: World) -> ParallelModel:
    if job.model is None or job.loss is None:
        return build_parallel_decoder(job.config, job.layout, precision, world)
    # The user's modules may live in memory that all ranks share: train on copies, and give the weights back at the end.
    model, loss = copy.deepcopy(job.model), copy.deepcopy(job.loss) if isinstance(job.loss, nn.Module) else job.loss
    objective = Objective(model.to(world.device, precision.weights), loss).to(world.device)
    return parallelize(
        objective, job.config, job.layout, world, job.parallel_spec.under_objective() if job.parallel_spec else None
    )


def build_parallel_decoder(config: RunConfig, layout: Layout, precision: Precision, world: World) -> ParallelModel:
    """The config's own model with its initial weights, each rank's part made by itself."""

    def weights(block: LocalShard, name: str) -> None:
        init_shard(block.local, name, block.shape, block.offset, config.model, config.seed)

    return parallelize(
        build_on_meta(config.model, precision.weights),
        config,
        layout,
        world,
        decoder_parallel_spec(config.model),
        weights,
    )


def user_modules(job: Job) -> list[nn.Module]:
    """What a user brought that has weights to train."""
    return [module for module in (job.model, job.loss) if isinstance(module, nn.Module)]


@torch.no_grad()
def copy_trained_weights(trained: Objective, job: Job, write: bool) -> None:
    """Blocks are put together by all of their holders; some of these write."""
    for mine, theirs in zip((trained.model, trained.loss), user_modules(job), strict=False):
        state = mine.state_dict()
        for name, value in theirs.state_dict().items():
            whole = full_tensor(state[name])
            if write:
                value.copy_(whole)


def set_determinism(config: RunConfig, world: World) -> None:
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
