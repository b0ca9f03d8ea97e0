"""Fits the constants of trainers to measured step times: a bounded coordinate search over a few fields of a profile.

Every field starts at the default of `TrainerProfile`. In each round every field tries factors around its value, and
keeps the one with the smallest loss: the mean absolute error of the logarithm of the step time, which a single outlier
hardly moves, and a small penalty on the distance from the start, so that a field that the runs do not determine stays
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log
from statistics import mean
from typing import Any

from meshwright.planner.calibration.published.published_runs import PublishedRun
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile

BOUNDS: Mapping[str, tuple[float, float]] = {
    "residual_traffic_bytes": (8, 90),
    "ffn_traffic_bytes": (3, 25),
    "score_traffic_bytes": (5, 25),
    "loss_traffic_bytes": (8, 120),
    "attention_efficiency": (0.25, 1.0),
    "layer_launch_seconds": (5e-5, 2e-3),
    "quantize_traffic_bytes": (1, 15),
    "matmul_efficiency": (0.85, 1.15),
    "tensor_overlap": (0.05, 0.9),
    "fixed_step_seconds": (1e-3, 0.1),
}
"""Fitted field -> its bounds: what is physically plausible."""
STARTS = {"quantize_traffic_bytes": 5.0, "tensor_overlap": 0.3, "fixed_step_seconds": 0.01}
"""Values at which fields start whose default in `TrainerProfile` is zero or only Meshwright's."""
OWN_FIELDS: Mapping[str, tuple[float, ...]] = {
    "host_gap_seconds": (0.0, 1e-3, 2e-3, 4e-3, 8e-3),
    "misalignment_slowdown": (1.0, 2.0, 4.0),
    "context_attention_slowdown": (1.0, 1.25, 1.5, 2.0),
    "post_ampere_attention": (1.0, 0.8, 0.65, 0.5),
    "pipeline_overlap": (0.0, 0.4, 0.8),
    "contention": (0.06, 0.0, 0.12),
}
"""Fields that are fitted to the runs of one generation of a trainer alone -> the values that they try, the default of a
trainer that was never measured first."""
EXPERT_FIELDS = ("moe_layer_launch_seconds", "graphed_kernels", "expert_overlap", "interleaved_expert_overlap")
"""Fields of MoE layers that differ between releases of one trainer. Without any run of it they are the defaults."""
FITTED_FIELDS = (*BOUNDS, *OWN_FIELDS, "moe_layer_launch_seconds")
"""Fields of the step time that are fitted to runs, not known."""
STEPS = ((0.6, 1.7), (0.8, 1.25))
"""By round, the factors that a field tries."""
MAX_FITTED_RUNS = 24
"""Limit on the runs that a fit uses, evenly spaced over those that there are."""
PENALTY = 0.003
"""Weight of the squared distance of a field from its start, in the logarithm."""
MAX_ERROR = 0.3
"""Errors count up to this much, because larger ones have another cause than the fitted fields."""


def starting_values() -> dict[str, float]:
    """The fitted fields of a trainer of which nothing is known."""
    default = TrainerProfile("unknown")
    return {name: STARTS.get(name) or getattr(default, name) for name in BOUNDS}


def fit_fields(runs: list[PublishedRun]) -> dict[str, float]:
    """Returns the values of the fitted fields that predict these runs best, whatever their trainers are."""
    values = starting_values()
    if not runs:
        return values
    chosen = evenly_spaced(runs)
    best = loss(chosen, values)
    relevant = {name: bounds for name, bounds in BOUNDS.items() if matters(chosen, name, values)}
    for factors in STEPS:
        for name, (low, high) in relevant.items():
            start = values[name]
            for factor in factors:
                attempt = values | {name: min(high, max(low, start * factor))}
                if attempt[name] != values[name] and (error := loss(chosen, attempt)) < best:
                    best, values = error, attempt
    return values


def evenly_spaced(runs: list[PublishedRun]) -> list[PublishedRun]:
    """At most MAX_FITTED_RUNS of these runs, from the first one on."""
    count = min(len(runs), MAX_FITTED_RUNS)
    return [runs[index * len(runs) // count] for index in range(count)]


def matters(runs: list[PublishedRun], name: str, values: dict[str, float]) -> bool:
    """Whether a field changes the prediction of any of these runs."""
    largest = values | {name: BOUNDS[name][1]}
    return any(predicted_error(run, run.job, largest) != predicted_error(run, run.job, values) for run in runs)


def fit_own_fields(runs: list[PublishedRun], values: dict[str, float]) -> dict[str, float]:
    """Returns `values` with the fields that differ between the trainers of a family, fitted to runs of one of them."""
    values = values | {name: choices[0] for name, choices in OWN_FIELDS.items()}
    if not runs:
        default = TrainerProfile("unknown")
        return values | {name: getattr(default, name) for name in EXPERT_FIELDS}
    chosen = evenly_spaced(runs)
    for name, choices in OWN_FIELDS.items():
        if all(getattr(run.job.trainer, name) == choices[0] for run in chosen):
            continue  # the profile of this trainer does not use the field
        values = min((values | {name: choice} for choice in choices), key=lambda attempt: loss(chosen, attempt))
    return values


def loss(runs: list[PublishedRun], values: dict[str, float]) -> float:
    """The mean absolute error of these runs in the logarithm of the step time, and the penalty."""
    errors = [min(MAX_ERROR, abs(log(1 + predicted_error(run, run.job, values)))) for run in runs]
    starts = starting_values()
    return mean(errors) + PENALTY * sum(log(values[name] / start) ** 2 for name, start in starts.items())


def predicted_error(run: PublishedRun, job: PlannedJob, values: Mapping[str, Any]) -> float:
    """The relative error of the step time of a run whose trainer has these values of the fitted fields."""
    seconds = estimate_step(replace(job, trainer=replace(job.trainer, **values)), []).seconds
    return seconds / run.seconds - 1 if run.seconds else 0.0
