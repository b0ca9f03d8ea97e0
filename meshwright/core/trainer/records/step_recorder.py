"""Records each step and applies the policies on bad samples and on values that are not finite."""

from __future__ import annotations

import math
import resource
import sys
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright.base.config import Batch, RunConfig
from meshwright.base.records.events import EventLog
from meshwright.base.records.spans import SpanLog
from meshwright.base.topology.collectives import wire_bytes
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.trainer.expert_balancer import imbalance
from meshwright.core.trainer.numerics import NoiseScale, first_nonfinite
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.measures import find_measures
from meshwright.core.trainer.step import StepOutcome
from meshwright.errors import DataError, NumericsError, PeerError

EXPOSED_SOURCES = {"cpu": "host waits", "cuda": "device events"}
"""How exposed communication is measured, by device: waits block the training thread, or the stream that computes."""


class StepRecorder:
    """Turns step outcomes into records. On CUDA an outcome is read one step late, so that no step waits for the
    device.
    """

    def __init__(
        self,
        config: RunConfig,
        batch: Batch,
        world: World,
        parallel_model: ParallelModel,
        precision: Precision,
        log: EventLog,
        spans: SpanLog,
    ) -> None:
        self.config, self.batch, self.world = config, batch, world
        self.parallel_model, self.precision, self.log, self.spans = parallel_model, precision, log, spans
        self.noise = NoiseScale(batch.global_, batch.replicas)
        self.pending: StepOutcome | None = None
        self.clock: StepClock | None = None
        """the clock of the newest step on record"""
        self.step_seconds: deque[tuple[int, float]] = deque(maxlen=1000)
        """(step, seconds) of the newest steps without counters and profile"""
        self.bad_samples = self.skipped = self.consecutive_skips = 0
        self.loss: float | None = None
        self.objective = find_measures(parallel_model.module)
        self.metrics: dict[str, float] = {}
        """the metrics of the newest step"""
        self.evaluations: list[tuple[int, float]] = []
        self.memory = MemoryFigures.read(world.device)

    def counters(self) -> dict[str, Any]:
        """Returns the counters that a restart continues; they are equal on every rank."""
        return {
            "bad_samples": self.bad_samples,
            "skipped": self.skipped,
            "in_a_row": self.consecutive_skips,
            "loss": finite_or_none(self.loss),
            "evaluations": [[step, finite_or_none(loss)] for step, loss in self.evaluations],
        }

    def restore(self, counters: dict[str, Any]) -> None:
        self.bad_samples, self.skipped = int(counters["bad_samples"]), int(counters["skipped"])
        self.consecutive_skips, self.loss = int(counters["in_a_row"]), counters["loss"]
        self.evaluations = [
            (int(step), float("nan") if loss is None else loss) for step, loss in counters["evaluations"]
        ]

    def add(self, outcome: StepOutcome) -> None:
        """Takes an outcome: it is recorded at once on CPU, and with the next one on CUDA."""
        self.flush()
        self.pending = outcome
        if self.world.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Records the pending outcome, if there is one."""
        outcome, self.pending = self.pending, None
        if outcome is None:
            return
        outcome.clock.wait()
        outcome.clock.follow(self.clock)
        self.clock = outcome.clock
        loss, norm, local_square, finite, scale = outcome.numbers.tolist()
        self.loss = loss
        reduction, phases, waits = outcome.reduction, outcome.clock.seconds(), outcome.clock.waits.seconds()
        self.world.heartbeat.complete_step(local_seconds(phases, waits))
        noise = self.noise.update(norm, local_square) if finite else None
        extra: dict[str, Any] = {"skipped": True} if not finite else {}
        if outcome.clock.outside:
            extra["outside"] = outcome.clock.outside
        if outcome.counted:
            extra["counted"] = True
        if outcome.profiled:
            extra["profiled"] = True
        if not (outcome.counted or outcome.profiled):
            self.step_seconds.append((outcome.step, sum(phases.values())))
        if self.precision.scaler is not None:
            extra["loss_scale"] = scale
        if outcome.in_flight is not None:
            extra["pipeline"] = {
                "live": outcome.in_flight.peak_total,
                "live_by_stage": outcome.in_flight.peak,
                "idle": idle_fraction(phases),
            }
        if outcome.measured is not None and self.objective is not None:
            self.metrics = self.objective.measured_values(
                outcome.measured.tolist(), outcome.control.tokens, f"rank {self.world.rank} step {outcome.step}"
            )
        self.metrics |= outcome.facts
        if self.metrics:
            extra["metrics"] = {name: finite_or_none(value) for name, value in self.metrics.items()}
        before, self.memory = self.memory, MemoryFigures.read(self.world.device, self.memory.peak)
        extra |= self.memory.events_since(before)
        if outcome.expert_loads is not None:
            loads = outcome.expert_loads
            extra["experts"] = {"imbalance": imbalance(loads), "dropped": int(loads[:, -1].sum())}
        self.log.write(
            "step",
            step=outcome.step,
            begin=round(outcome.clock.begin, 6),
            loss=finite_or_none(loss),
            grad_norm=finite_or_none(norm),
            lr=outcome.lr,
            tokens=outcome.control.tokens,
            samples=self.batch.global_,
            phases=phases,
            waits=waits,
            seconds=round(sum(phases.values()), 7),
            communication={
                "buckets": reduction.buckets,
                "message_bytes": reduction.message_bytes,
                "wire_bytes": wire_bytes("all_reduce", reduction.message_bytes, self.world.size),
                "exposed_seconds": round(phases["sync"] + sum(waits.values()), 7),
                "exposed_source": EXPOSED_SOURCES[self.world.device.type],
            },
            noise_scale=finite_or_none(noise),
            memory=self.memory.peak,
            **extra,
        )
        actions = {"actions": outcome.in_flight.actions} if outcome.in_flight is not None else {}
        begin = round(outcome.clock.begin, 6)
        self.spans.write("step", step=outcome.step, begin=begin, **outcome.clock.span(), **actions)
        if outcome.expert_loads is not None and self.world.rank == 0 and outcome.step % self.config.log_every == 0:
            self.log.write("experts", step=outcome.step, loads=loads[:, :-1].tolist(), dropped=loads[:, -1].tolist())
        self._bad_samples(outcome)
        self._nonfinite(outcome, loss, bool(finite))

    def add_evaluation(self, step: int, loss: float, tokens: int, bad: str, metrics: dict[str, float]) -> None:
        """Records an evaluation; a sample that cannot be decoded stops the run unless bad samples are quarantined."""
        if bad and self.config.data.on_bad_sample == "stop":
            raise DataError(
                f"rank {self.world.rank} step {step}, evaluation: {bad}",
                'try to repair the sample, or set data.on_bad_sample = "quarantine"',
            )
        measured = {"metrics": {name: finite_or_none(value) for name, value in metrics.items()}} if metrics else {}
        self.log.write("eval", step=step, loss=finite_or_none(loss), tokens=tokens, **measured)
        self.evaluations.append((step, loss))

    def _bad_samples(self, outcome: StepOutcome) -> None:
        for batch in outcome.batches:
            for bad in batch.bad_samples:
                self.log.write("bad_sample", step=outcome.step, **asdict(bad))
        self.bad_samples += outcome.control.bad_samples  # summed over ranks, so equal on all of them
        budget = self.config.data.bad_sample_budget
        if self.bad_samples > budget:
            raise DataError(
                f"rank {self.world.rank} step {outcome.step}: {self.bad_samples} samples could not be decoded, "
                f"data.bad_sample_budget = {budget}",
                "try to repair the samples that the bad_sample events list, or raise the budget",
            )

    def _nonfinite(self, outcome: StepOutcome, loss: float, finite: bool) -> None:
        if finite:
            self.consecutive_skips = 0
            return
        self.skipped += 1
        if self.precision.scaler is not None and math.isfinite(loss):
            return  # fp16: the loss scale was too high, which the scaler corrects
        self.consecutive_skips += 1
        where = first_nonfinite(self.parallel_model, outcome.batches, self.world.device, self.precision.autocast)
        self.log.write("nonfinite", step=outcome.step, loss=finite_or_none(loss), module=where)
        numerics = self.config.numerics
        if numerics.on_nonfinite == "skip" and self.consecutive_skips <= numerics.skip_budget:
            return
        message = f"rank {self.world.rank} step {outcome.step}: loss {loss} or its gradient is not finite"
        named = self.world.all_reduce_ints(where is not None, name="nonfinite sum").wait()
        if where is None and bool(named):
            raise PeerError(f"{message}, first on another rank")
        raise NumericsError(
            f"{message}, first in {where or 'the sum over ranks'}",
            "try a lower optimizer.lr, look at the samples with `meshwright data show`, or skip such steps "
            '(numerics.on_nonfinite = "skip")',
        )


def local_seconds(phases: dict[str, float], waits: dict[str, float]) -> dict[str, float]:
    """Returns the phases without the waits for other ranks inside them; those count as `sync`."""
    local = {phase: seconds - waits.get(phase, 0.0) for phase, seconds in phases.items()}
    return local | {"sync": phases["sync"] + sum(waits.values())}


def idle_fraction(phases: dict[str, float]) -> float:
    """Returns the fraction of forward, backward and sync that a pipeline rank waited for other stages."""
    busy = phases["forward"] + phases["backward"]
    return round(phases["sync"] / max(1e-9, busy + phases["sync"]), 4)


@dataclass(frozen=True)
class MemoryFigures:
    """The memory of this rank so far."""

    peak: int
    """peak bytes: of the allocator on CUDA, of the process on CPU"""
    major_faults: int
    """page faults that read from disk"""
    alloc_retries: int = 0
    """how often the CUDA allocator has freed its cached blocks to find memory"""

    @classmethod
    def read(cls, device: torch.device, peak: int = 0) -> MemoryFigures:
        """Reads the figures; `peak` is the peak so far, because a counted step resets that of the allocator."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            peak = max(peak, stats.get("allocated_bytes.all.peak", 0))
            return cls(peak, usage.ru_majflt, stats.get("num_alloc_retries", 0))
        return cls(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), usage.ru_majflt)

    def events_since(self, before: MemoryFigures) -> dict[str, int]:
        """Returns the page faults and retries since `before`, without those that did not occur."""
        names = ("major_faults", "alloc_retries")
        counts = {name: getattr(self, name) - getattr(before, name) for name in names}
        return {name: count for name, count in counts.items() if count}


def finite_or_none(value: float | None) -> float | None:
    """Returns None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
