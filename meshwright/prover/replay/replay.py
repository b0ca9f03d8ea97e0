"""Runs one step of a run again, from the nearest checkpoint, and shows it in detail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.launch.scratch_run import scratch_job
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.records.step_recorder import finite_or_none
from meshwright.core.trainer.step import StepOutcome
from meshwright.errors import ConfigError
from meshwright.prover.replay.detail_recorder import DetailRecorder, RankDetail
from meshwright.prover.replay.records import compare_fields, event_fields
from meshwright.prover.replay.sample_losses import sample_losses
from meshwright.prover.replay.sample_texts import sample_texts
from meshwright.prover.replay.start import ReplaySource
from meshwright.prover.replay.step_detail import ModuleDetail, ParameterDetail, SampleDetail, StepReplay


@dataclass
class RankReplay:
    """What one rank returns."""

    detail: RankDetail
    steps: list[Event]
    """the records of the steps of the replay, the last one that of the step itself; on rank 0 only"""
    losses: list[tuple[int, float, int]]
    """(sample, mean loss, valid targets) in global order"""
    notes: list[str]


def replay_step(
    folder: RunFolder,
    step: int,
    ranks: int | str | None = None,
    overrides: Sequence[str] = (),
    user: UserCode = NO_USER_CODE,
    tokenizer: str = "",
) -> StepReplay:
    """Restores the newest checkpoint at or before the step into a temporary folder, trains up to the step, and returns
    the step in detail. The run folder is only read.
    """
    run = ReplaySource.open(folder, ranks, overrides)
    if run.config.rl.enabled:
        raise ConfigError(
            f"{folder.root} was trained with rl.objective = {run.config.rl.objective}: its steps cannot be replayed",
            f"try meshwright data show {folder.root} --step {step}, which lists the rollouts of the step",
        )
    entry = run.checkpoint_before(step)
    with scratch_job(run.config_at(step), folder, entry, user) as job:
        launch = job.config.launch
        results = run_ranks(replay_rank, job.layout.ranks, job, step, timeout=math.inf, launch=launch)
        samples = describe_samples(run, job, results[0].losses, tokenizer)
    return make_replay(run, step, entry.name if entry is not None else "", job, results, samples)


def replay_rank(world: World, job: Job, step: int) -> RankReplay:
    """Trains on this rank up to the step, and runs the step under observation."""
    steps: list[Event] = []
    recorder = DetailRecorder(step)
    listener = lambda event: steps.append(event) if event["kind"] == "step" else None  # noqa: E731
    training = Training(replace(job, observer=recorder, listener=listener if world.rank == 0 else None), world)
    try:
        while training.done < step:
            training.run_step()
        training.recorder.flush()
        losses = sample_losses(training, step)
        with recorder.watch_modules():
            outcome = training.step.run(step, training.resume.learning_rate(step), training.batches)
        notes = [f"the code of the model changed: {text}" for text in code_changes(training)]
        return RankReplay(recorder.finish(), [*steps, outcome_fields(training, outcome)], losses, notes)
    finally:
        training.signals.close()
        training.saver.close()
        training.log.close()


def outcome_fields(training: Training, outcome: StepOutcome) -> Event:
    """The fields of a step's record that are compared. The step is not recorded: a loss that is not finite would end
    the replay.
    """
    outcome.clock.wait()
    loss, norm, _, finite, scale = outcome.numbers.tolist()
    return {
        "step": outcome.step,
        "loss": finite_or_none(loss),
        "grad_norm": finite_or_none(norm),
        "lr": outcome.lr,
        "tokens": outcome.control.tokens,
        "loss_scale": scale if training.precision.scaler is not None else None,
        "skipped": not finite,
    }


def code_changes(training: Training) -> list[str]:
    """What changed in the code of a custom model since the run."""
    changes = training.identity["code_changes"]
    return [text for change in changes if change["attempt"] == training.job.attempt for text in change["changes"]]


def describe_samples(
    run: ReplaySource, job: Job, losses: Sequence[tuple[int, float, int]], tokenizer: str
) -> list[SampleDetail]:
    """The samples of the step with their source and text."""
    everything = ConcatenatedSource(job.sources)
    texts = sample_texts(run.folder.root, job, [sample for sample, _, _ in losses], tokenizer)
    details = []
    for sample, loss, targets in losses:
        source, index = everything.locate(sample)
        details.append(SampleDetail(sample, source.name, index, loss, targets, texts.get(sample, "")))
    return details


def make_replay(
    run: ReplaySource, step: int, checkpoint: str, job: Job, results: Sequence[RankReplay], samples: list[SampleDetail]
) -> StepReplay:
    """Joins what the ranks measured, and compares the steps with their records."""
    first, records = results[0], run.records.steps
    replayed = {event["step"]: event_fields(event) for event in first.steps}
    different = {
        number: found
        for number, event in replayed.items()
        if number in records and (found := compare_fields(event, records[number]))
    }
    values = first.steps[-1]
    notes = [*filter(None, [run.layout_note(step)]), *first.notes]
    if job.config.compile.enabled:
        notes.append("blocks are compiled: outputs of modules are not measured, because a hook would compile them anew")
    return StepReplay(
        step,
        checkpoint,
        first.steps[0]["step"],
        str(job.layout),
        nan_if_none(values["loss"]),
        nan_if_none(values["grad_norm"]),
        values["lr"],
        values["tokens"],
        values["loss_scale"],
        values["skipped"],
        records.get(step),
        different.get(step, {}),
        min(different, default=None),
        join_parameters([result.detail for result in results]),
        join_modules([result.detail for result in results]),
        samples,
        notes,
        run.is_deterministic(step),
    )


def nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value


def join_parameters(details: Sequence[RankDetail]) -> list[ParameterDetail]:
    """Every parameter in the order of the model; a shard that several ranks have counts once."""
    names = dict.fromkeys(name for detail in details for name in detail.parameters)
    joined = []
    for name in names:
        shards = {(f.offset, f.shape): f for detail in details if (f := detail.parameters.get(name)) is not None}
        parts = list(shards.values())
        joined.append(
            ParameterDetail(
                name,
                parts[0].layer,
                math.prod(parts[0].full_shape),
                math.sqrt(sum(part.gradient_square for part in parts)),
                max_or_nan([part.largest_gradient for part in parts]),
                sum(part.nonfinite_gradients for part in parts),
                math.sqrt(sum(part.weight_square for part in parts)),
                math.sqrt(sum(part.update_square for part in parts)),
            )
        )
    return joined


def join_modules(details: Sequence[RankDetail]) -> list[ModuleDetail]:
    """Every module in the order of computation: that of each rank, and pipeline stages in the order of their ranks. The
    mean square is the same whether ranks have copies or parts of an output.
    """
    joined = []
    for name in dict.fromkeys(name for detail in details for name in detail.modules):
        rows = [detail.modules[name] for detail in details if name in detail.modules]
        elements = sum(row[4] for row in rows)
        rms = math.sqrt(sum(row[1] for row in rows) / elements) if elements else 0.0
        joined.append(
            ModuleDetail(name, rows[0][0], rms, max_or_nan([row[2] for row in rows]), sum(row[3] for row in rows))
        )
    return joined


def max_or_nan(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
