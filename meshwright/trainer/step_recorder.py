"""What became of each step: the record of it, and the policies on bad samples and on numbers that are not finite."""

from __future__ import annotations

import math
import resource
import sys
from collections import deque
from dataclasses import asdict
from typing import Any

import torch

from meshwright.config import Batch, RunConfig
from meshwright.errors import DataError, NumericsError, PeerError
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.world import World
from meshwright.telemetry.events import EventLog
from meshwright.topology.collectives import wire_bytes
from meshwright.trainer.expert_balancer import imbalance
from meshwright.trainer.numerics import NoiseScale, first_nonfinite
from meshwright.trainer.precision import Precision
from meshwright.trainer.step import StepOutcome


class StepRecorder:
    """Turns outcomes into records and applies the policies. On CUDA an outcome is read one step late, so that no step
    waits for the device.
    """

    def __init__(
        self, config: RunConfig, batch: Batch, world: World, spread: ParallelModel, precision: Precision, log: EventLog
    ) -> None:
        self.config, self.batch, self.world = config, batch, world
        self.parallel_model, self.precision, self.log = spread, precision, log
        self.noise = NoiseScale(batch.global_, batch.replicas)
        self.waiting: StepOutcome | None = None
        self.paces: deque[tuple[int, float]] = deque(maxlen=1000)
        """the newest steps that were not counted, with their seconds"""
        self.bad_samples = self.skipped = self.in_a_row = 0
        self.loss: float | None = None
        self.evaluations: list[tuple[int, float]] = []

    def counters(self) -> dict[str, Any]:
        """What must go on counting after a restart; the same on every rank."""
        return {
            "bad_samples": self.bad_samples,
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "loss": finite_or_none(self.loss),
            "evaluations": [[step, finite_or_none(loss)] for step, loss in self.evaluations],
        }

    def restore(self, counters: dict[str, Any]) -> None:
        self.bad_samples, self.skipped = int(counters["bad_samples"]), int(counters["skipped"])
        self.in_a_row, self.loss = int(counters["in_a_row"]), counters["loss"]
        self.evaluations = [
            (int(step), float("nan") if loss is None else loss) for step, loss in counters["evaluations"]
        ]

    def take(self, outcome: StepOutcome) -> None:
        self.settle()
        self.waiting = outcome
        if self.world.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Records the outcome that waits, if one does."""
        outcome, self.waiting = self.waiting, None
        if outcome is None:
            return
        outcome.clock.wait()
        loss, norm, local_square, finite, scale = outcome.numbers.tolist()
        self.loss = loss
        traffic, phases = outcome.reduction, outcome.clock.seconds()
        self.world.heartbeat.complete_step(phases)
        noise = self.noise.update(norm, local_square) if finite else None
        extra: dict[str, Any] = {"skipped": True} if not finite else {}
        if outcome.counted:
            extra["counted"] = True
        else:
            self.paces.append((outcome.step, sum(phases.values())))
        if self.precision.scaler is not None:
            extra["loss_scale"] = scale
        if outcome.in_flight is not None:
            extra["pipeline"] = {
                "live": outcome.in_flight.peak_total,
                "live_by_stage": outcome.in_flight.peak,
                "idle": idle(phases),
            }
        if outcome.expert_loads is not None:
            loads = outcome.expert_loads
            extra["experts"] = {"imbalance": imbalance(loads), "dropped": int(loads[:, -1].sum())}
        self.log.write(
            "step",
            step=outcome.step,
            loss=finite_or_none(loss),
            grad_norm=finite_or_none(norm),
            lr=outcome.lr,
            tokens=outcome.control.tokens,
            samples=self.batch.global_,
            phases=phases,
            seconds=round(sum(phases.values()), 7),
            communication={
                "buckets": traffic.buckets,
                "message_bytes": traffic.message_bytes,
                "wire_bytes": wire_bytes("all_reduce", traffic.message_bytes, self.world.size),
                "exposed_seconds": phases["sync"],
            },
            noise_scale=finite_or_none(noise),
            memory=memory_bytes(self.world.device),
            **extra,
        )
        if outcome.expert_loads is not None and self.world.rank == 0 and outcome.step % self.config.log_every == 0:
            self.log.write("experts", step=outcome.step, loads=loads[:, :-1].tolist(), dropped=loads[:, -1].tolist())
        self._bad_samples(outcome)
        self._nonfinite(outcome, loss, bool(finite))

    def evaluated(self, step: int, loss: float, tokens: int, bad: str) -> None:
        if bad and self.config.data.on_bad_sample == "stop":
            raise DataError(
                f"rank {self.world.rank} step {step}, evaluation: {bad}",
                'mend the sample, or set data.on_bad_sample = "quarantine"',
            )
        self.log.write("eval", step=step, loss=finite_or_none(loss), tokens=tokens)
        self.evaluations.append((step, loss))

    def _bad_samples(self, outcome: StepOutcome) -> None:
        for batch in outcome.batches:
            for bad in batch.bad_samples:
                self.log.write("bad_sample", step=outcome.step, **asdict(bad))
        self.bad_samples += outcome.control.bad_samples  # the same sum on every rank
        budget = self.config.data.bad_sample_budget
        if self.bad_samples > budget:
            raise DataError(
                f"rank {self.world.rank} step {outcome.step}: {self.bad_samples} samples could not be decoded, "
                f"data.bad_sample_budget = {budget}",
                "see the bad_sample events for each of them",
            )

    def _nonfinite(self, outcome: StepOutcome, loss: float, finite: bool) -> None:
        if finite:
            self.in_a_row = 0
            return
        self.skipped += 1
        if self.precision.scaler is not None and math.isfinite(loss):
            return  # fp16 found its scale too high: the scaler's business, not a fault
        self.in_a_row += 1
        where = first_nonfinite(self.parallel_model, outcome.batches, self.world.device, self.precision.autocast)
        self.log.write("nonfinite", step=outcome.step, loss=finite_or_none(loss), module=where)
        numerics = self.config.numerics
        if numerics.on_nonfinite == "skip" and self.in_a_row <= numerics.skip_budget:
            return
        what = f"rank {self.world.rank} step {outcome.step}: loss {loss} or its gradient is not finite"
        named = self.world.all_reduce_ints(where is not None, name="nonfinite sum").wait()
        if where is None and bool(named):
            raise PeerError(f"{what}, first on another rank")
        raise NumericsError(
            f"{what}, first in {where or 'the sum over ranks'}",
            "lower optimizer.lr, look at the samples with `meshwright data show`, or skip such steps "
            '(numerics.on_nonfinite = "skip")',
        )


def idle(phases: dict[str, float]) -> float:
    """The share of the time in a pipeline that a rank waited for its neighbours, or for messages on their way."""
    busy = phases["forward"] + phases["backward"]
    return round(phases["sync"] / max(1e-9, busy + phases["sync"]), 4)


def memory_bytes(device: torch.device) -> int:
    """The most this rank has held so far: of device memory on CUDA, of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null stands for both."""
    return value if value is not None and math.isfinite(value) else None
