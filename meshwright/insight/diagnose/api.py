"""The verb `diagnose` as functions: the findings of a run, and a trial of the change that the first one proposes."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, list_published, open_run_store
from meshwright.base.config import MetricsConfig, ProfileConfig, RunConfig, TrackersConfig, config_from_dict
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import read_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.base.store.mirror import resolve_run
from meshwright.base.terminal.event_viewer import SilentDisplay
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.diagnose.run.timed_steps import MIN_STEPS, timed_steps
from meshwright.insight.diagnose.run.trial import ChangeTrial
from meshwright.planner.report.change_cost import change_settings, changes_numbers

TRIAL_STEPS = 20
"""Steps of each side of a trial, beyond those that warm up."""
WARMUP_STEPS = 3
"""First steps of an attempt that are not timed: two that do work of their own, and one with counters."""


@dataclass(frozen=True)
class RunDiagnosis:
    """What limits or breaks a run, the most important finding first."""

    folder: Path
    findings: list[Finding]
    trial: ChangeTrial | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        trial = None
        if self.trial is not None:
            trial = asdict(self.trial) | {"came_true": self.trial.came_true}
        return {"run": str(self.folder), "findings": [one.to_json() for one in self.findings], "trial": trial}


def diagnose_folder(run: Path | str) -> RunDiagnosis:
    """Diagnoses a run that is running, finished or failed. Its folder is only read."""
    folder = resolve_run(run)
    return RunDiagnosis(folder, diagnose_run(RunHistory(RunFolder(folder))))


def try_first_finding(
    run: Path, entry_points: Mapping[str, str], *, steps: int = TRIAL_STEPS, fork: bool = False
) -> RunDiagnosis:
    """Diagnoses a run, and runs the first change of settings that is proposed, for a few steps from the newest
    checkpoint.

    Both the settings of the run and the changed ones run in a temporary folder; the run folder is only read.

    Args:
        run: run folder.
        entry_points: the user's model, loss and data as MODULE:NAME, for a run of a custom model.
        steps: steps of each side.
        fork: whether settings may be tried that change the numbers of the run.
    """
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps {steps} are too few to measure", f"expected at least {MIN_STEPS}")
    history = RunHistory(RunFolder(run))
    findings = diagnose_run(history)
    with_settings = (one for one in findings if one.change.settings and one.change.predicted_seconds is not None)
    return RunDiagnosis(run, findings, run_trial(history, next(with_settings, findings[0]), entry_points, steps, fork))


def run_trial(
    history: RunHistory, finding: Finding, entry_points: Mapping[str, str], steps: int, fork: bool
) -> ChangeTrial:
    folder, measured = history.folder, timed_steps(history)
    if measured is None or not finding.change.settings or finding.change.predicted_seconds is None:
        raise ConfigError(
            f"no finding of {folder.root} proposes settings that change the step time",
            f"try {finding.change.action or finding.check}",
        )
    if history.is_alive:
        raise ConfigError(
            f"{folder.root} is running, and would disturb the measurement", "try it when the run has ended"
        )
    if len(set(measured.hosts)) > 1:
        raise ConfigError(f"{folder.root} ran on several hosts", "try the settings in a run of their own there")
    config = config_from_dict(history.config)
    changed = change_settings(config, finding.change.settings)
    numbers = changes_numbers(config, changed)
    if numbers and not fork:
        raise ConfigError(
            f"{', '.join(finding.change.settings)} changes the numbers of the run",
            "try --fork to measure it nevertheless, on a timeline of its own",
        )
    saves = finding.cause == "checkpoint"
    checkpoint = newest_checkpoint(folder)
    first = checkpoint.step if checkpoint is not None else 0
    before, after = (
        run_side(trial_config(side, first + steps + WARMUP_STEPS, saves), folder, checkpoint, entry_points, saves)
        for side in (config, changed)
    )
    ratio = 1 - finding.share if saves else finding.change.predicted_seconds / measured.duration
    return ChangeTrial(finding.change.settings, first, steps, numbers, before, before * ratio, after)


def newest_checkpoint(folder: RunFolder) -> CheckpointEntry | None:
    """The newest checkpoint of the run, or None if it has none."""
    try:
        lineage = RunLineage.from_identity(read_json(folder.identity_file))
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{folder.identity_file} is not a valid identity record", "try another run folder") from None
    return next(iter(list_published(open_run_store(folder), lineage)), None)


def trial_config(config: RunConfig, steps: int, saves: bool) -> RunConfig:
    """The settings of one side: nothing but training, and saves if they are what is measured."""
    return replace(
        config,
        steps=steps,
        trackers=TrackersConfig(),
        metrics=MetricsConfig(),
        profile=ProfileConfig(),
        eval=replace(config.eval, every=0),
        launch=replace(config.launch, restarts=0),
        checkpoint=config.checkpoint if saves else replace(config.checkpoint, mode="off"),
    )


def run_side(
    config: RunConfig,
    run: RunFolder,
    checkpoint: CheckpointEntry | None,
    entry_points: Mapping[str, str],
    with_saves: bool,
) -> float:
    """Trains one side in a temporary folder, and returns its seconds per step, with the time between steps if saves
    are measured.
    """
    from meshwright.core.api.training import train_with_fork_server

    remove_stale_folders()
    scratch = ScratchFolder()
    try:
        folder = RunFolder(scratch.path / "run")
        if checkpoint is not None:
            link_checkpoint(run, folder, checkpoint)
        silent = lambda _attempt: SilentDisplay()  # noqa: E731
        train_with_fork_server(config, folder.root, silent, entry_points, fork=checkpoint is not None, accept_code=True)
        history = RunHistory(folder)
        if with_saves:
            table = history.steps()
            return float(np.mean(np.diff(table.begin[WARMUP_STEPS:])))
        steps = timed_steps(history)
        if steps is None:
            raise ConfigError(f"{config.steps} steps are too few to measure", "try more steps")
        return steps.duration
    finally:
        scratch.remove()


def link_checkpoint(run: RunFolder, folder: RunFolder, checkpoint: CheckpointEntry) -> None:
    """Links the files of a checkpoint into a run folder that does not exist yet, beside a copy of the identity."""
    source, target = run.root / checkpoint.folder, folder.root / checkpoint.folder
    target.mkdir(parents=True)
    shutil.copyfile(run.identity_file, folder.identity_file)
    for file in source.iterdir():
        if stat.S_ISREG(file.lstat().st_mode):
            try:
                os.link(file, target / file.name)
            except OSError:  # another file system
                shutil.copyfile(file, target / file.name)
