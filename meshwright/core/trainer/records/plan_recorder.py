"""Writes the prediction of a run to plan.json, and adds the measured run to the calibration at its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.base.io import write_json
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.records.events import EventLog
from meshwright.base.records.untrusted_records import WARMUP_STEPS
from meshwright.core.parallel.world import World
from meshwright.core.trainer.records.start_record import device_name
from meshwright.core.trainer.records.trace_custom_model import trace_run
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.base.config import RunConfig
    from meshwright.core.trainer.job import Job

MIN_STEPS = 10
"""Timed steps that a run needs to enter the calibration."""


PREDICTORS = "meshwright.predictors"
"""The group of the extensions that predict runs; the planner is one."""


class PredictionOfRun(Protocol):
    """The prediction of a run."""

    @property
    def record(self) -> dict[str, Any]:
        """The content of plan.json."""

    def save_measurement(self, seconds: float, tensors: float | None) -> dict[str, Any] | None:
        """Keeps the median step time and the peak tensor bytes of rank 0 for later predictions, and returns what it
        keeps.
        """


class Predictor(Protocol):
    """Predicts a run before its first step. An error in the prediction is noted in its record and not raised."""

    def __call__(
        self,
        config: RunConfig,
        attempt: int,
        device: str,
        cluster: str | None,
        trace: Callable[[], TracedModel] | None,
    ) -> PredictionOfRun: ...


@dataclass(frozen=True)
class NoPrediction:
    """What there is without a predictor."""

    record: dict[str, Any] = field(default_factory=lambda: {"notes": ["no prediction: no predictor is installed"]})

    def save_measurement(self, seconds: float, tensors: float | None) -> None:
        """There is no prediction to correct."""


def trace_job(job: Job) -> TracedModel:
    """Traces the user's model of a job."""
    assert job.custom is not None
    return trace_run(job.custom, job.config, job.batch, job.sources)


class PlanRecorder:
    """The prediction of one attempt, on rank 0. A failure in here never ends a run."""

    def __init__(self, job: Job, world: World) -> None:
        self.is_recorder = world.rank == 0
        self.peak: int | None = None
        """the largest peak of live tensor bytes that was counted"""
        if self.is_recorder:
            trace = partial(trace_job, job) if job.custom is not None else None
            self.prediction: PredictionOfRun = NoPrediction()
            if job.predictor is not None:
                self.prediction = job.predictor(job.config, job.attempt, device_name(world.device), job.cluster, trace)
            with suppress(OSError):
                write_json(job.folder.plan_file, self.prediction.record)

    def observe_peak(self, peak: int) -> None:
        """Takes the peak memory of a counted step."""
        self.peak = max(self.peak or 0, peak)

    def record_calibration(self, step_seconds: list[tuple[int, float]], first_step: int, log: EventLog) -> None:
        """Adds a finished run to the calibration; `step_seconds` are its steps without counters and their seconds."""
        seconds = [seconds for step, seconds in step_seconds if step >= first_step + WARMUP_STEPS]
        if not self.is_recorder or len(seconds) < MIN_STEPS:
            return
        with suppress(OSError, ConfigError):
            if (record := self.prediction.save_measurement(median(seconds), self.peak)) is not None:
                log.write("calibrated", steps=len(seconds), **record)
