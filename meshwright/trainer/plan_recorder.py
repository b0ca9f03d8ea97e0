"""What the first rank knows of its run beforehand, written into the folder, and what the end teaches later plans."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from meshwright.errors import ConfigError
from meshwright.io import write_json
from meshwright.parallel.world import World
from meshwright.planner.calibration.run_prediction import predict_run
from meshwright.telemetry.events import EventLog
from meshwright.telemetry.run_measurements import WARMUP_STEPS
from meshwright.trainer.start_record import device_name

if TYPE_CHECKING:
    from meshwright.trainer.loop import Job

MIN_STEPS = 10
"""Steps that a run must have made to teach anything."""


class PlanRecorder:
    """The prediction of one attempt. Nothing in here may end a run."""

    def __init__(self, job: Job, world: World) -> None:
        self.known = world.rank == 0
        self.peak: int | None = None
        """bytes of live tensors at the most that a ledger counted"""
        if self.known:
            self.foretold = predict_run(
                job.config, job.attempt, device_name(world.device), job.cluster, own_model=job.model is not None
            )
            with suppress(OSError):
                write_json(job.folder.plan_file, self.foretold.record)

    def counted(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)

    def end(self, paces: list[tuple[int, float]], began: int, log: EventLog) -> None:
        """A run that came to its end: `paces` are its uncounted steps with their seconds."""
        seconds = [seconds for step, seconds in paces if step >= began + WARMUP_STEPS]
        if not self.known or len(seconds) < MIN_STEPS:
            return
        with suppress(OSError, ConfigError):
            if (record := self.foretold.save_measurement(median(seconds), self.peak)) is not None:
                log.write("calibrated", steps=len(seconds), **asdict(record))
