"""Leave-one-out errors use no run of what is left out, and the fit recovers constants that made the runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.hardware.cluster import NODE_TYPES, preset_cluster
from meshwright.planner.calibration import leave_one_out as module
from meshwright.planner.calibration.leave_one_out import chip, leave_one_out, unfitted_device
from meshwright.planner.calibration.profile_fit import (
    BOUNDS,
    MAX_FITTED_RUNS,
    evenly_spaced,
    fit_fields,
    loss,
    starting_values,
)
from meshwright.planner.calibration.published.published_runs import PublishedRun, parse_run
from meshwright.planner.calibration.replay import publisher
from meshwright.planner.cost.step_time import estimate_step

PUBLISHED_RUNS = Path(__file__).parents[2] / "examples" / "published_runs.json"


def published_runs(*prefixes: str) -> list[PublishedRun]:
    rows = [row for row in json.loads(PUBLISHED_RUNS.read_text()) if row["id"].startswith(prefixes)]
    return [run for row in rows if (run := parse_run(row, row["id"])).seconds and not run.flagged]


def test_no_run_of_the_source_that_is_left_out_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = published_runs("mosaic-1", "titan-8b", "sc21")
    fitted: list[set[str]] = []

    def record(chosen: list[PublishedRun]) -> dict[str, float]:
        fitted.append({publisher(run.source) for run in chosen})
        return starting_values()

    monkeypatch.setattr(module, "fit_fields", record)
    monkeypatch.setattr(module, "fit_own_fields", lambda runs, values: values | {"runs": len(runs)})
    predicted: dict[str, Any] = {}
    monkeypatch.setattr(
        module, "predicted_error", lambda run, _job, values: predicted.setdefault(run.name, values)["runs"]
    )
    assert set(leave_one_out(runs, lambda run: publisher(run.source))) == {run.name for run in runs}
    sources = {publisher(run.source) for run in runs}
    assert len(sources) == 3
    assert fitted
    assert all(chosen and chosen < sources for chosen in fitted)


def test_device_that_is_left_out_loses_its_fitted_rate() -> None:
    job = published_runs("sc21")[0].job
    assert unfitted_device(job, {"a100-80"}) is job
    changed = unfitted_device(job, {"h100"}).cluster.device
    assert changed.sustained_fraction != job.cluster.device.sustained_fraction
    assert changed.peak_flops == job.cluster.device.peak_flops


def test_device_that_is_left_out_takes_no_fraction_from_its_own_chip() -> None:
    """A100s of 40 and 80 GB and the A800 have one fraction; every other chip counts once."""
    job = published_runs("sc21")[0].job
    assert chip("a100-40") == chip("a100-80") == chip("a800")
    assert chip("h100") == chip("h800") == chip("gh200") == chip("h100-500w") != chip("h200")
    fractions = {chip(name): node.device.sustained_fraction["bf16"] for name, node in reversed(NODE_TYPES.items())}
    del fractions["a100"]
    expected = sum(fractions.values()) / len(fractions)
    assert unfitted_device(job, set()).cluster.device.sustained_fraction["bf16"] == pytest.approx(expected)


def test_device_of_a_source_that_is_left_out_has_the_fraction_of_its_chip() -> None:
    job = replace(published_runs("sc21")[0].job, cluster=preset_cluster("h100-500w", 8))
    fraction = unfitted_device(job, {"h100", "a100-80"}).cluster.device.sustained_fraction["bf16"]
    assert fraction == NODE_TYPES["h100"].device.sustained_fraction["bf16"]
    assert fraction != job.cluster.device.sustained_fraction["bf16"]


def test_fit_recovers_a_constant_that_made_the_step_times() -> None:
    runs = published_runs("mosaic-1", "mosaic-3")[:12]
    truth: dict[str, Any] = starting_values() | {"residual_traffic_bytes": 68.0}
    made = [
        replace(run, seconds=estimate_step(replace(run.job, trainer=replace(run.job.trainer, **truth)), []).seconds)
        for run in runs
    ]
    values = fit_fields(made)
    assert loss(made, values) < 0.3 * loss(made, starting_values())
    assert all(low <= values[name] <= high for name, (low, high) in BOUNDS.items())


@pytest.mark.parametrize("count", [1, 23, 24, 25, 47, 48, 49, 129])
def test_fit_uses_at_most_so_many_runs_evenly_spaced(count: int) -> None:
    numbers: list[Any] = list(range(count))
    chosen = evenly_spaced(numbers)
    assert len(chosen) == min(count, MAX_FITTED_RUNS) == len(set(chosen))
    gaps = [after - before for before, after in pairwise([*chosen, count])]
    assert max(gaps) - min(gaps) <= 1


def test_fit_without_runs_stays_at_the_start() -> None:
    assert fit_fields([]) == starting_values()
