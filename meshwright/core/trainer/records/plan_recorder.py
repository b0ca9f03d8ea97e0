"""Writes the prediction of a run to plan.json, and adds the measured run to the calibration at its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from meshwright.base.io import write_json
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.records.events import EventLog
from meshwright.base.records.untrusted_records import WARMUP_STEPS
from meshwright.core.parallel.world import World
from meshwright.core.trainer.records.start_record import device_name
from meshwright.core.trainer.records.trace_custom_model import trace_run
from meshwright.errors import ConfigError
from meshwright.planner.calibration.run_prediction import predict_run

if TYPE_CHECKING:
    from meshwright.core.trainer.job import Job

MIN_STEPS = 10
"""Timed steps that a run needs to enter the calibration."""


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
            self.prediction = predict_run(job.config, job.attempt, device_name(world.device), job.cluster, trace)
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
                log.write("calibrated", steps=len(seconds), **asdict(record))
