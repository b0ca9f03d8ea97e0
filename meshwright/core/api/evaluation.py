"""`evaluate` as a function: loss, perplexity and metrics of a checkpoint on another data set or on held-out samples.

The run folder is only read, so that a run can be evaluated while it trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.block_sizes import BLOCK_SIZES
from meshwright.base.cli.python_args import errors_for_python, given_run
from meshwright.base.config import RunConfig, identity, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.config.rl import RLConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.unused_settings import require_data_settings
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import CheckpointError, ConfigError, DataError, IdentityError

if TYPE_CHECKING:
    from meshwright.base.checkpoint.listing import CheckpointEntry
    from meshwright.core.data.permutation import Positions
    from meshwright.core.data.source import Source
    from meshwright.core.parallel.world import World
    from meshwright.core.trainer.job import Job

UNREAD_SECTIONS = (
    *("steps", "log_every", "count_bytes_every", "planned_for", "optimizer", "schedule", "rl", "numerics"),
    *("checkpoint", "early_stopping", "trackers", "profile", "metrics"),
)
"""The sections and settings of a config that an evaluation does not read."""


@dataclass(frozen=True)
class EvaluationResult:
    """What `meshwright.evaluate` returns."""

    checkpoint: str
    """name of the checkpoint"""
    step: int
    samples: int
    """number of samples"""
    held_out: bool
    """whether they are the run's held-out samples; otherwise they are those of another data set"""
    tokens: int
    """number of valid targets, over which the loss is averaged"""
    loss: float
    perplexity: float
    metrics: dict[str, float]


def evaluate(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    ranks: int | str | None = None,
    step: int | None = None,
    samples: int | None = None,
    user: UserCode | None = None,
) -> EvaluationResult:
    """Evaluates a checkpoint on the data of ``overrides``, every sample once, or on the run's held-out samples.

    Args:
        run: run folder.
        overrides: settings that differ from those of the run, such as ``["data.kind=text", "data.path=other.txt"]``.
        ranks: number of ranks. Default: the layout of the run.
        step: step of the checkpoint. Default: the newest.
        samples: number of samples. Default: all of another data set, ``eval.samples`` of the held-out ones.
        user: the user's model, loss, data and metrics.

    Returns:
        EvaluationResult: loss, perplexity and metrics. They do not depend on the number of ranks.

    Raises:
        ConfigError: a setting or an argument is not valid.
        IdentityError: the checkpoint is of another model.
        CheckpointError: there is no intact checkpoint.
        DataError: a sample cannot be decoded.
    """
    with errors_for_python():
        return evaluate_run(given_run(run, "run"), overrides, ranks, step, samples, user or UserCode())


def evaluate_run(
    run: Path,
    overrides: Sequence[str],
    ranks: int | str | None,
    step: int | None,
    samples: int | None,
    user: UserCode,
) -> EvaluationResult:
    from meshwright.core.checkpoint.inspect import reporting_deletion, select_intact
    from meshwright.core.launch.ranks import run_ranks

    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples} is out of range", "expected 1 or more")
    RunFolder(run).require_own_folders()
    entry = select_intact(run, step)
    names = [override.removeprefix("--").partition("=")[0] for override in overrides]
    if unread := [name for name in names if name.partition(".")[0] in UNREAD_SECTIONS]:
        raise ConfigError(f"{unread[0]} has no effect on an evaluation", f"try without --{unread[0]}")
    config = with_recorded_model(load_config(run, list(overrides), ranks), entry, overrides)
    if config.rl.enabled:
        require_other_data(run, config, names, user)
        config = replace(config, rl=RLConfig())
    if user.source is None:
        if any(name.startswith("data.") for name in names):
            require_data_settings(config)
        config = with_run_tokenizer(config, load_config(run))
    job, held_out, ids = make_evaluation_job(config, RunFolder(run), user, samples)
    launch = job.config.launch
    with reporting_deletion(entry):
        results = run_ranks(evaluate_rank, job.layout.ranks, job, entry, ids, timeout=math.inf, launch=launch)
    if bad := next((found for _, _, found, _ in results if found), ""):
        raise DataError(f"a sample cannot be decoded: {bad}", "try to repair the data, or other data")
    loss, tokens, _, metrics = results[0]
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return EvaluationResult(entry.name, entry.step, len(ids), held_out, tokens, loss, perplexity, metrics)


def require_other_data(run: Path, config: RunConfig, names: Sequence[str], user: UserCode) -> None:
    """Raises a ConfigError if a run of reinforcement learning is evaluated on its prompts, which have no targets."""
    if user.source is None and not any(name.startswith("data.") for name in names):
        raise ConfigError(
            f"{run} was trained with rl.objective = {config.rl.objective}, and its prompts have no targets for a loss",
            "try other data (--data.kind=KIND --data.path=FILE), or meshwright report RUN for its rewards",
        )


def with_run_tokenizer(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """The config with the tokenizer of the run for text that names none: the model knows no other tokens."""
    from meshwright.core.data.tokenization import find_run_tokenizer

    if not config.data.lacks_tokenizer:
        return config
    if recorded.rl.has_task:
        raise ConfigError(
            f"data.kind = {config.data.kind} is text, and the tokens of the run are the characters of its task",
            "try token ids of the task (data.kind = tokens or shards), or meshwright report RUN for its rewards",
        )
    return replace(config, data=replace(config.data, tokenizer=find_run_tokenizer(recorded) or ""))


def with_recorded_model(config: RunConfig, entry: CheckpointEntry, overrides: Sequence[str]) -> RunConfig:
    """The config with the model and the low-rank adaptation of the checkpoint, which those of the run file may differ
    from after a fork. Raises IdentityError for an override that differs from them.
    """
    from meshwright.core.weights.adapters import lora_of
    from meshwright.core.weights.export import model_of

    assert entry.manifest is not None
    if (model := model_of(entry.manifest)) is None:
        return config
    recorded = replace(config, model=model, lora=lora_of(entry.manifest))
    expected, found = identity(recorded), identity(config)
    for name in (override.removeprefix("--").partition("=")[0] for override in overrides):
        keys = [key for key in expected | found if f"{key}.".startswith(f"{name}.")]
        for key in keys if name.partition(".")[0] in ("model", "lora") else ():
            if found.get(key) != expected.get(key):
                raise IdentityError(
                    f"checkpoint {entry.name} is of another model: {key} = {expected.get(key)}, and --{key}="
                    f"{found.get(key)} is given",
                    f"try without --{name}",
                )
    return recorded


def make_evaluation_job(
    config: RunConfig, folder: RunFolder, user: UserCode, samples: int | None
) -> tuple[Job, bool, Positions]:
    """The job of an evaluation, whether its data is that of the run, and the ids of its samples."""
    import numpy as np

    from meshwright.base.models.registry import validate_family
    from meshwright.base.topology.layout import Layout
    from meshwright.base.topology.unsupported import validate
    from meshwright.core.data.sample_lookup import build_stream
    from meshwright.core.launch.initial_weights import open_initial_weights
    from meshwright.core.launch.user_code.make_custom_model import open_user_code
    from meshwright.core.parallel.world import device_type
    from meshwright.core.trainer.job import Job

    config = with_device_defaults(config, device_type(config.launch), user.model is not None)
    count, micro = Layout.from_config(config.layout).ranks, config.batch.micro or min(8, config.batch.global_)
    divisible = replace(config, batch=replace(config.batch, global_=micro * count, micro=micro))
    layout, batch = validate(divisible, own_model=user.model is not None)
    config, custom, sources = open_user_code(config, user)
    if custom is None:
        validate_family(config)
    weights = open_initial_weights(config, folder, custom) if config.lora.enabled else None
    held_out = is_data_of_run(folder, sources)
    if held_out:
        ids = build_stream(config, sources).held_out_samples(samples or config.eval.samples)
    else:
        total = sum(map(len, sources))
        ids = np.arange(min(total, samples or total), dtype=np.uint64)
    if not len(ids):
        raise ConfigError(
            "the run has no held-out samples (eval.holdout)",
            "try --data.kind=text --data.path=FILE of another data set",
        )
    return Job(config, batch, layout, sources, folder, custom=custom, weights=weights), held_out, ids


def is_data_of_run(folder: RunFolder, sources: Sequence[Source]) -> bool:
    """Whether these are the sources that the run trains on, by their fingerprints."""
    from meshwright.core.trainer.identity import read_identity

    recorded = read_identity(folder).get("sources", [])
    known = [source.get("fingerprint") for source in recorded if isinstance(source, Mapping)]
    return known == [source.fingerprint() for source in sources]


def evaluate_rank(
    world: World, job: Job, entry: CheckpointEntry, ids: Positions
) -> tuple[float, int, str, dict[str, float]]:
    """Loads the weights of a checkpoint into the parallelized model, and evaluates this rank's share of the samples."""
    from meshwright.core.checkpoint.frozen import separate_frozen
    from meshwright.core.checkpoint.restore import (
        first_damage_on_any_rank,
        gather_index,
        gather_mismatches,
        load_tensors,
    )
    from meshwright.core.checkpoint.state import collect_state
    from meshwright.core.data.source import ConcatenatedSource
    from meshwright.core.trainer.build import build_parallel_model
    from meshwright.core.trainer.evaluate import Evaluation
    from meshwright.core.trainer.precision import Precision, set_determinism

    config, layout, manifest = job.config, job.layout, entry.manifest
    assert manifest is not None
    set_determinism(config.precision, config.launch.threads, world.device)
    precision = Precision(config.precision, world.device)
    model = build_parallel_model(config, layout, job.custom, precision, world, job.weights)
    saved, base = separate_frozen(model.master_parameters(), config, layout, world)
    if base.get("digest") != manifest.base.get("digest"):
        raise CheckpointError(
            f"checkpoint {entry.name} refers to other frozen parameters: {manifest.base.get('digest', 'none')}, and "
            f"those of the run have digest {base.get('digest', 'none')}",
            "try to restore the folder that init_from names",
        )
    state = collect_state(model.module, saved, {})
    tensors = {name: record for name, record in manifest.tensors.items() if not name.startswith("optimizer/")}
    if mismatches := gather_mismatches(state, tensors, world):
        raise IdentityError(f"checkpoint {entry.name} is of another model: {mismatches[0]}")
    index, _, found = gather_index(entry, world)
    if (damage := first_damage_on_any_rank(world, found)) is not None:
        raise CheckpointError(f"checkpoint {entry.name} is damaged: {damage}")
    load_tensors(entry, state, world, BLOCK_SIZES.io_bytes, index)
    model.round_masters()
    model.after_update()
    samples: tuple[Any, ...] = (job.custom.batch, job.custom.collate) if job.custom is not None else ()
    coordinate = layout.data_coordinate(world.rank)
    evaluation = Evaluation(ConcatenatedSource(job.sources), ids, job.batch, coordinate, *samples)
    reports_loss = model.has_loss and layout.is_first_on(world.rank, ["tensor"])
    return evaluation.run(model, precision, world, layout.counts_tokens(world.rank), reports_loss)
