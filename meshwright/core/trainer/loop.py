"""The training loop of one rank: build, restore, then step by step: run, record, evaluate, save."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from meshwright.base.checkpoint.listing import RunLineage, list_published, open_run_store
from meshwright.base.config import config_to_dict
from meshwright.base.config.device_defaults import without_device_defaults
from meshwright.base.records.events import Event, EventLog
from meshwright.base.records.spans import SpanLog
from meshwright.core import faults
from meshwright.core.checkpoint.frozen import separate_frozen
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver, SaveResult
from meshwright.core.checkpoint.snapshots.schedule import SnapshotSchedule
from meshwright.core.checkpoint.state import CheckpointState, collect_state, digest_parallel_parameters
from meshwright.core.data.loader import Loader
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.data.token_files import raise_if_changed
from meshwright.core.optim.build import build_optimizer
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.data_parallel.replica_check import compare_replicas
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.parallel.parallel_model import router_biases
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.callbacks.callback import RunContext, StopRequested
from meshwright.core.trainer.callbacks.dispatcher import CallbackDispatcher
from meshwright.core.trainer.custom_model import copy_trained_weights
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.first_batch.choices import make_choices
from meshwright.core.trainer.first_batch.fused_head_check import verify_fused_head
from meshwright.core.trainer.first_batch.parallel_pass import compare_with_plain_pass
from meshwright.core.trainer.identity import build_identity, check_run_folder, write_run_folder
from meshwright.core.trainer.job import Job, open_peer_memory
from meshwright.core.trainer.objective import Objective
from meshwright.core.trainer.precision import Precision, named_operators, set_determinism
from meshwright.core.trainer.records.plan_recorder import PlanRecorder
from meshwright.core.trainer.records.run_summary import RunSummary
from meshwright.core.trainer.records.start_record import rank_record, write_start
from meshwright.core.trainer.records.step_counters import StepCounters, count_step, group_axes
from meshwright.core.trainer.records.step_profiler import StepProfiler
from meshwright.core.trainer.records.step_recorder import StepRecorder, finite_or_none
from meshwright.core.trainer.resume import ResumeState
from meshwright.core.trainer.signals import SignalWatch
from meshwright.core.trainer.step import Step, StepContext
from meshwright.core.weights.initial import require_folder
from meshwright.errors import CheckpointError, StoppedBySignal
from meshwright.rl.policy.rollouts import RolloutLoader, open_rollouts


def train_rank(job: Job, world: World) -> RunSummary:
    """Trains on this rank, from the newest checkpoint to the last step."""
    faults.arm(world.rank, job.restart)
    faults.fail_point("start.begin", -1)
    with named_operators():
        return run_training(Training(job, world))


def run_training(training: Training) -> RunSummary:
    """Runs the remaining steps, then saves and records the end of the run."""
    try:
        while training.done < training.config.steps and not training.stopping:
            training.run_step()
            if training.evaluation_is_due():
                training.evaluate()
            training.save_if_due()
    except StopRequested:
        training.parallel_model.reshard()
    except StoppedBySignal:
        training.parallel_model.reshard()
        training.recorder.flush()  # the last complete step is on record
        training.profiler.close()
        training.save_now()
        raise
    finally:
        training.signals.close()
    return training.finish()


class Training:
    """The state of a run on one rank. `run_step` runs the next step; `done` is the number of completed steps."""

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world, self.config = job, world, job.config
        self.signals = SignalWatch(world.heartbeat, job.stop_signals)
        set_determinism(self.config.precision, self.config.launch.threads, world.device)
        self.precision = Precision(self.config.precision, world.device)
        build = partial(build_parallel_model, self.config, job.layout, job.custom)
        self.parallel_model = build(self.precision, world, job.weights)
        self.module = self.parallel_model.module
        self.stream = build_stream(self.config, job.sources)
        self.store = job.store or open_run_store(job.folder)

        self.identity = self._check_identity()
        self.lineage = RunLineage.from_identity(self.identity)
        self.callbacks = self._build_callbacks()
        self.stopping = False
        """whether a callback has asked all ranks to end the run"""
        self.log = self._open_log()
        self.plan_recorder = PlanRecorder(job, world)
        placed = rank_record(job, self.parallel_model, world)
        self.spans = SpanLog(job.folder.spans(world.rank), job.attempt, placed)
        self.recorder = StepRecorder(
            self.config, job.batch, world, self.parallel_model, self.precision, self.log, self.spans
        )

        self.parameters = self.parallel_model.master_parameters()
        self.saved, self.base = separate_frozen(self.parameters, self.config, job.layout, world)
        self.optimizer = self._build_optimizer()
        self.rollouts = open_rollouts(job, world, self.lineage.run, self.precision.parameters, self.log)
        self.resume = self._build_resume_state()
        self.saver = self._build_saver()
        self.callbacks.run.on_keep = self.saver.keep_steps
        self.snapshots = SnapshotSchedule(open_peer_memory(job), self.saver, self.log)
        self.step = self._build_step()
        axes = partial(group_axes, self.parallel_model, self.optimizer)
        self.profiler = StepProfiler(
            self.config.profile, job.folder, job.attempt, world, placed, axes, self.spans, self.log
        )

        source, coordinate = ConcatenatedSource(job.sources), self.step.context.data_coordinate
        samples = (job.custom.batch, job.custom.collate) if job.custom is not None else ()
        loader: Loader | RolloutLoader = self.rollouts or Loader(
            source, self.stream, job.batch, coordinate, self.config.data, job.block_sizes, *samples
        )
        held_out = self.stream.held_out_samples(0 if self.rollouts is not None else self.config.eval.samples)
        self.evaluation = Evaluation(source, held_out, job.batch, coordinate, *samples)
        with self.spans.span("warmup", job.first_step):
            head = verify_fused_head(self.parallel_model, world, loader.first, self.precision.autocast)
            if head is not None and not head.enabled:
                self.log.write("unfused_loss", reason=head.problem)
            choices = make_choices(job, self.step, self.identity, loader.first)
            self.resume.made_by |= choices.to_record()
            if world.device.type == "cuda":
                self.log.write("choices", **choices.to_json())
            self.step.check_context(loader.first)
            self.step.warmup_backward(loader.first)
            compare_with_plain_pass(job, self.step)

        with self.spans.span("restore", job.first_step):
            self.done = self.first_step = self._restore()
        if world.rank == 0:  # after every check, or a refused run would change the folder
            write_run_folder(job.folder, without_device_defaults(job.config, job.given or job.config), self.identity)
        if self.rollouts is not None and self.done < self.config.steps:
            parameters = partial(collect_state, self.module, self.saved, {})
            self.rollouts.signal_seen = self.signals.received
            # the first attempt with these initial weights
            first = max(1, self.identity["forked_by"], *(c["attempt"] for c in self.identity["code_changes"]))
            self.rollouts.begin(self.done, self.lineage, self.resume.manifest_facts(), parameters, first)
        self.batches = loader.steps(self.done, self.config.steps)
        job.observer.on_start(self)
        self.callbacks.begin(self.done, self.log)

    def _check_identity(self) -> Event:
        """Checks on rank 0 that the run folder belongs to this run, and returns its identity record on every rank."""
        job = self.job
        code = job.custom.code if job.custom is not None else job.update.code
        record = build_identity(self.config, job.sources, self.stream, job.custom, job.weights, code)
        if self.world.rank == 0:
            newest = next((entry.step for entry in list_published(self.store)), -1)
            attempt, accept_code = job.attempt, job.accept_code
            record = check_run_folder(
                job.folder, record, fork=job.fork, attempt=attempt, newest=newest, accept_code=accept_code
            )
        identity: Event = self.world.broadcast_object(record if self.world.rank == 0 else None, "identity")
        return identity

    def _open_log(self) -> EventLog:
        """Opens this rank's event log and writes the start record."""
        job, rank = self.job, self.world.rank
        listener = self.callbacks.listener(job.listener if rank == 0 else None)
        log = EventLog(job.folder.events(rank), job.attempt, rank, listener, self.world.heartbeat.set_lost_events)
        write_start(log, job, self.parallel_model, self.stream, self.identity, self.world)
        return log

    def _build_callbacks(self) -> CallbackDispatcher:
        job, config = self.job, config_to_dict(self.config)
        run = RunContext(job.folder, self.lineage.run, job.attempt, self.world.rank, config)
        return CallbackDispatcher(job.callbacks, run, self.world.heartbeat)

    def _build_optimizer(self) -> Optimizer:
        model, config = self.parallel_model, self.config.optimizer
        more = (model.block_patterns, model.name_prefix, self.job.update.optimizer)
        return build_optimizer(model.parameters(), config, self.job.layout, self.world, *more, model.masters)

    def state(self) -> CheckpointState:
        """Returns the tensors that a checkpoint contains."""
        return collect_state(self.module, self.saved, self.optimizer.moments())

    def _build_resume_state(self) -> ResumeState:
        job, values, schedule = self.job, self.identity["identity"], self.job.update.schedule
        more = (self.world, self.base, schedule, self.rollouts)
        return ResumeState(self.config, job.batch, job.layout, self.stream, values, self.lineage, *more)

    def _build_saver(self) -> CheckpointSaver:
        return CheckpointSaver(
            self.config.checkpoint,
            self.store,
            self.world,
            self.lineage,
            self.job.attempt,
            self.resume.manifest_facts(),
            self.state,
            self.config.launch.hang_timeout,
            self.job.layout,
            self.job.block_sizes,
        )

    def _build_step(self) -> Step:
        context = StepContext.for_rank(
            self.config, self.job.layout, self.world, self.parallel_model, self.optimizer, self.precision
        )
        context.signal_seen = self.signals.received
        context.stop_requested = lambda: bool(self.callbacks.run.stop_reason)
        context.before_update = self.saver.block_update
        context.on_gradient = self.job.observer.on_gradient
        if self.world.rank == 0:
            context.save_state = self.snapshots.poll
        return Step(context)

    def _restore(self) -> int:
        """Restores the newest intact checkpoint and returns its number of steps; without one, the job's first step."""
        restored = restore(
            self.store,
            self.world,
            self.lineage,
            self.state(),
            self.resume.validate,
            fallback=self.job.fallback,
            on_damaged=lambda name, damage: self.log.write(
                "damaged", checkpoint=name, damage=[item.to_json() for item in damage]
            ),
            owner=self.resume.owner,
            block_sizes=self.job.block_sizes,
            memory=self.snapshots.store,
            on_incomplete=self.snapshots.report_incomplete,
            find_state_damage=self.resume.find_damage,
        )
        self.optimizer.after_restore(restored is not None)
        if restored is None:
            require_folder(self.job.weights)
            self.resume.record_extension(self.log, 0, self._steps_before())
            return self.job.first_step
        manifest = restored.manifest
        self.parallel_model.round_masters()
        self.parallel_model.after_update()
        self.resume.apply(manifest, restored.owner_state, self.recorder, self.precision)
        self.saver.continue_from(manifest, bool(restored.hosts))
        self.log.write(
            "restored",
            step=manifest.step,
            checkpoint=restored.name,
            seconds=round(restored.seconds, 3),
            changes=self.resume.changes(manifest),
            **restored.source(),
        )
        if manifest.timeline == self.lineage.timeline:
            self.resume.record_extension(self.log, manifest.step, self.resume.steps_of(manifest))
        return manifest.step

    def _steps_before(self) -> int:
        """Returns the run's number of steps before this attempt."""
        extensions = [e for e in self.identity["extensions"] if e["attempt"] == self.job.attempt]
        return int(extensions[0]["from"]) if extensions else self.config.steps

    def run_step(self) -> None:
        """Runs and records the next step."""
        lr = self.resume.learning_rate(self.done)
        counters: StepCounters | None = None
        compiled = bool(self.config.compile.enabled)
        with self.profiler.step(self.done) as profiled:
            if self.counting_is_due():
                with count_step(self.parallel_model, self.optimizer, compiled=compiled) as counters:
                    outcome = self.step.run(self.done, lr, self.batches, counters.enter)
            else:
                outcome = self.step.run(self.done, lr, self.batches)
        outcome.counted, outcome.profiled = counters is not None, profiled
        outcome.facts = self.rollouts.facts if self.rollouts is not None else {}
        self.recorder.add(outcome)
        if counters is not None:
            self.log.write("counters", step=self.done, **counters.to_json())
            self.plan_recorder.observe_peak(counters.peak_total)
        self.job.observer.on_step(outcome)
        faults.fail_point("step.updated", self.done)
        self.done += 1
        self.control = outcome.control
        every = self.config.numerics.compare_every
        if every and self.done % every == 0 and self.world.size > 1:
            tensors = self.parameters | dict(router_biases(self.module))
            shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
            compare_replicas(shards, self.job.layout, self.world, self.done - 1)

    def counting_is_due(self) -> bool:
        """Whether the next step is counted: the second of an attempt, when all lazy parts exist, then at a cadence."""
        every = self.config.count_bytes_every
        later = self.done > self.first_step
        return every > 0 and later and (self.done == self.first_step + 1 or self.done % every == 0)

    def evaluation_is_due(self) -> bool:
        cadence = self.config.eval
        if not (cadence.every and self.evaluation.samples):
            return False
        return self.done % cadence.every == 0 or self.done == self.config.steps

    def evaluate(self) -> None:
        """Computes and records the loss on held-out samples."""
        self.world.heartbeat.enter("evaluate")
        faults.fail_point("evaluate", self.done - 1)
        self.recorder.flush()
        context = self.step.context
        with self.spans.span("evaluate", self.done):
            result = self.evaluation.run(
                self.parallel_model, self.precision, self.world, context.counts_tokens, context.reports_loss
            )
        self.recorder.add_evaluation(self.done - 1, *result)
        self.job.observer.on_evaluation(self.done - 1, result[0], result[1])
        if self.job.callbacks:
            self._agree_on_requests()

    def _agree_on_requests(self) -> None:
        """Sums what the callbacks of all ranks asked for after an evaluation, so that every rank does the same."""
        requests = (bool(self.callbacks.run.stop_reason), self.callbacks.take_save_request())
        stop, save = self.world.all_reduce_ints(*requests, name="requests of callbacks").wait().tolist()
        self.stopping = bool(stop)
        self.control.save_due |= bool(save) and self.config.checkpoint.mode != "off"

    def checkpoint_metadata(self) -> CheckpointMetadata:
        return self.resume.metadata(self.done, self.recorder, self.precision, self.step.model_use)

    def save_if_due(self) -> None:
        """Starts a save if the step control vector asked for one, and records the result of the previous save."""
        if self.control.save_due or self.control.snapshot_due:
            raise_if_changed(self.job.sources)
            self.recorder.flush()
            with self.spans.span("save", self.done):
                results = self.snapshots.save(self.checkpoint_metadata(), in_memory=not self.control.save_due)
            self._record_saves(results)
        elif self.control.save_finished:
            self._record_saves(self.saver.wait())
        elif warning := self.saver.stall_warning():
            self.log.write("save_failed", step=self.done, message=warning)

    def save_now(self) -> None:
        """Saves a checkpoint after this step, and waits for it."""
        self.world.heartbeat.enter("save")
        raise_if_changed(self.job.sources)
        self._record_saves(self.saver.wait())
        if self.saver.newest_step != self.done and self.config.checkpoint.mode != "off":
            with self.spans.span("save", self.done):
                results = self.saver.save(self.checkpoint_metadata(), wait=True)
            self._record_saves(results, required=True)

    def _record_saves(self, results: list[SaveResult], required: bool = False) -> None:
        for result in self.snapshots.record(results):
            self.spans.checkpoint(result.step, result.seconds)
            if result.error is None:
                self.log.write("checkpoint", **result.to_json())
                continue
            self.log.write("save_failed", step=result.step, message=str(result.error))
            stops = required or self.config.checkpoint.on_failure == "stop"
            if stops or not isinstance(result.error, CheckpointError):
                raise result.error

    def finish(self) -> RunSummary:
        """Saves the last checkpoint and records the end of the run."""
        faults.fail_point("end", self.done)
        self.recorder.flush()
        self.profiler.close()
        self.save_now()
        self.world.heartbeat.enter("end")
        self.saver.close()
        if self.rollouts is not None:
            self.rollouts.close()
        digest = digest_parallel_parameters(
            self.saved, self.job.layout, self.world, self.parallel_model.forward_is_collective
        )
        recorder = self.recorder
        summary = RunSummary(self.done, recorder.loss, recorder.skipped, digest, recorder.evaluations, recorder.metrics)
        summary.stopped = self.callbacks.run.stop_reason if self.done < self.config.steps else ""
        self.plan_recorder.record_calibration(list(recorder.step_seconds), self.first_step, self.log)
        complete = self.first_step == self.done > 0
        end = asdict(summary) | {"loss": finite_or_none(summary.loss), "was_complete": complete}
        self.log.write("end", **end, outside=self.world.heartbeat.take_outside())
        self.log.close()
        self.spans.close()
        if self.job.custom is not None and isinstance(self.module, Objective):
            write = self.world.rank == 0 or not self.job.supervised  # forked ranks share the modules, torchrun's do not
            mesh = self.parallel_model.meshes.submesh("pipeline")
            group = mesh.get_group() if mesh is not None else None
            copy_trained_weights(self.module, self.parallel_model.masters, self.job.custom.modules(), write, group)
        return summary
