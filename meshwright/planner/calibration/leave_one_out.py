"""Predicts published runs with constants that were fitted without them: without their source, or without their device.

The fitted fields of a trainer are fitted anew to the runs of its family that remain, or of the most similar family if
no run of its own remains. A device that no remaining run used has the sustained fraction of another one of its chip, or
else the mean of the other chips. To leave out a device is to leave out all devices of its chip. What still saw the runs
that are left out: the sustained fraction of a device that another source used as well, and the constants that are not
among `FITTED_FIELDS`, such as those of MoE layers by release and those of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from meshwright.base.hardware.cluster import NODE_TYPES
from meshwright.errors import ConfigError
from meshwright.planner.calibration.profile_fit import fit_fields, fit_own_fields, predicted_error
from meshwright.planner.calibration.published.published_runs import PublishedRun
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile

MAX_GROUPS = 64
"""Limit on the sources or devices that are left out in turn: each is a fit of all trainers, of a few seconds."""
LeftOut = dict[str, float]
"""Name of a run -> relative error of its step time."""
MEASURED_DEVICES = ("h200",)
"""Devices whose sustained rate was measured, and not fitted to runs."""
SAME_CHIP = {
    **dict.fromkeys(("a100-40", "a100-80", "a800"), "a100"),
    **dict.fromkeys(("h100", "h100-500w", "h800", "gh200"), "h100"),
}
"""Device -> its chip, of devices that have it in common: their sustained fractions are copies, except for h100-500w."""
NEAREST_FAMILIES = {
    "eager torch": ("compiled torch", "megatron"),
    "compiled torch": ("eager torch", "megatron"),
    "megatron": ("eager torch", "compiled torch", "early megatron"),
    "early megatron": ("megatron", "eager torch"),
}
"""Family -> other families, the most similar one first."""


def chip(device: str) -> str:
    """The chip of a device."""
    return SAME_CHIP.get(device, device)


def family(trainer: TrainerProfile) -> str:
    """The trainers that share kernels: fitted fields of one are a fair guess for another."""
    if trainer.torch_native:
        return "compiled torch" if trainer.residual_traffic_bytes < 30 else "eager torch"
    return "megatron" if trainer.flash_attention else "early megatron"


def leave_one_out(runs: list[PublishedRun], group: Callable[[PublishedRun], str]) -> LeftOut:
    """Returns the error of every run, predicted with constants that no run of its group contributed to."""
    errors: LeftOut = {}
    groups = sorted({group(run) for run in runs})
    if len(groups) > MAX_GROUPS:
        raise ConfigError(
            f"--leave-one-out would fit all trainers {len(groups):,} times, without each source",
            f"expected runs of at most {MAX_GROUPS} sources",
        )
    for left_out in groups:
        others = [run for run in runs if group(run) != left_out]
        devices = {run.job.cluster.device.name for run in others}
        fitted: dict[str, dict[str, float]] = {}
        fitted_trainers: dict[str, dict[str, float]] = {}
        for run in runs:
            if group(run) != left_out:
                continue
            kind, trainer = family(run.job.trainer), run.job.trainer.name
            if kind not in fitted:
                fitted[kind] = fit_fields(nearest_runs(others, kind))
            if trainer not in fitted_trainers:
                same = [other for other in others if other.job.trainer.name == trainer]
                fitted_trainers[trainer] = fit_own_fields(same, fitted[kind])
            errors[run.name] = predicted_error(run, unfitted_device(run.job, devices), fitted_trainers[trainer])
    return errors


def nearest_runs(runs: list[PublishedRun], kind: str) -> list[PublishedRun]:
    """The runs of a family of trainers, or of the most similar family that has any."""
    for candidate in (kind, *NEAREST_FAMILIES[kind]):
        if members := [run for run in runs if family(run.job.trainer) == candidate]:
            return members
    return []


def unfitted_device(job: PlannedJob, fitted_devices: set[str]) -> PlannedJob:
    """The job on its device, without what only the runs that are left out determine: its sustained fraction is that of
    another device of its chip that remains, or else the mean of the other chips.
    """
    device = job.cluster.device
    if device.name in fitted_devices or device.name in MEASURED_DEVICES:
        return job
    fractions = {name: node.device.sustained_fraction for name, node in NODE_TYPES.items()}
    siblings = [name for name in fractions if name in fitted_devices and chip(name) == chip(device.name)]
    by_chip = {chip(name): fraction for name, fraction in reversed(fractions.items())}
    rates = [fractions[name] for name in siblings[:1]] or [
        fraction for name, fraction in by_chip.items() if name != chip(device.name)
    ]
    sustained = {
        precision: mean(rate.get(precision, rate["bf16"]) for rate in rates) for precision in device.sustained_fraction
    }
    return replace(job, cluster=replace(job.cluster, device=replace(device, sustained_fraction=sustained)))
