"""One optimizer step: fetch, copy, forward, backward, sync, update. Done whole, or it never happened."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright import faults
from meshwright.data.loader import BadSample, MicroBatch
from meshwright.errors import DataError, NumericsError, PeerError, StoppedBySignal
from meshwright.optim.adamw import AdamW
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.local_shard import local_tensor
from meshwright.parallel.parallel_model import GradientReduction, ParallelModel, stateful_buffers
from meshwright.parallel.pipeline_parallel.pipeline_model import InFlightTracker, PipelineModel
from meshwright.parallel.world import World
from meshwright.telemetry.step_clock import StepClock
from meshwright.trainer.expert_balancer import ExpertBalancer
from meshwright.trainer.precision import Precision


@dataclass
class StepControl:
    """What all ranks know of a step before any of them computes a gradient."""

    tokens: int
    bad_samples: int
    save: bool = False
    """a checkpoint is due once this step is done"""
    saved: bool = False
    """the save before has ended"""


@dataclass
class StepOutcome:
    """A step as it leaves the device, to be read once its clock has passed: `numbers` is (loss, gradient norm,
    square of this rank's own gradient, finite, loss scale).
    """

    step: int
    lr: float
    control: StepControl
    numbers: Tensor
    traffic: GradientReduction
    clock: StepClock
    batches: list[MicroBatch]
    counted: bool = False
    """whether the ledgers were on, which makes a step slower"""
    in_flight: InFlightTracker | None = None
    """what this rank held while a pipeline's schedule ran"""
    loads: Tensor | None = None
    """tokens of every expert over all ranks, see Balance"""


class Step:
    """The parts that a step needs, and the step itself."""

    def __init__(
        self,
        spread: ParallelModel,
        optimizer: AdamW,
        precision: Precision,
        world: World,
        *,
        expert_balancer: ExpertBalancer,
        seed: int,
        coordinate: int,
        counts_tokens: bool = True,
        reports_loss: bool = True,
        quarantine: bool = False,
        signal_seen: Callable[[], int] = lambda: 0,
        saving: Callable[[int], tuple[bool, bool]] = lambda _done: (False, False),
    ) -> None:
        """Of the ranks that share a `coordinate`, and with it their samples, one `speaks` for their number; of those
        that come to the same loss one `weighs`.
        """
        self.parallel_model, self.optimizer, self.precision, self.world = spread, optimizer, precision, world
        self.expert_balancer = expert_balancer
        self.seed, self.coordinate, self.counts_tokens, self.reports_loss = (
            seed,
            coordinate,
            counts_tokens,
            reports_loss,
        )
        self.quarantine, self.signal_seen, self.saving = quarantine, signal_seen, saving
        self.stateful = any(True for _ in stateful_buffers(spread.module))
        self.in_flight: InFlightTracker | None = None
        """of the last step, where there is a pipeline"""

    def run(
        self,
        step: int,
        lr: float,
        stream: Iterator[list[MicroBatch]],
        watch: Callable[[str], None] = lambda _phase: None,
    ) -> StepOutcome:
        """Fetches the step's micro-batches, computes the gradient of the global mean, and updates once. `watch` hears
        of every phase.
        """
        clock = StepClock(self.world.device, self.world.heartbeat, step, watch)
        if clock.enter("fetch") == "flip":
            flip_bit(self.parallel_model.module)
        batches = next(stream)
        agreement, loss = self.gradient(step, batches, clock)
        clock.enter("update")
        scale = self.precision.scale
        norm = self.optimizer.gradient_norm() / scale
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self.optimizer.update(lr, norm, scale, finite)
        self.parallel_model.after_update()
        self.optimizer.zero(in_place=self.parallel_model.zero_in_place and len(batches) > 1)
        loads = self.expert_balancer.end(finite)
        if self.precision.scaler:
            self.precision.scaler.update(finite)
        traffic = self.parallel_model.pop_gradient_reduction()
        local = self._local_square(traffic, agreement, batches, norm) / scale**2
        on_host = to_host(torch.stack([t.double() for t in (loss, norm, local, finite, scale)]))
        loads = to_host(loads) if loads is not None else None
        clock.close()
        return StepOutcome(step, lr, agreement, on_host, traffic, clock, batches, in_flight=self.in_flight, loads=loads)

    def gradient(self, step: int, batches: list[MicroBatch], clock: StepClock) -> tuple[StepControl, Tensor]:
        """Leaves in every parameter the gradient of (sum of token losses) / (count of valid tokens) over the whole
        global batch, and gives that loss.
        """
        self._seed(step)
        self.expert_balancer.begin(self.precision.scale, self.precision.weights)
        if faults.fail_point("step.collective", step) == "desync":
            self.world.all_reduce(torch.zeros(7), "a stray sum").wait()
        asked = self.world.all_reduce_ints(
            *self._control_vector(step, batches), name="control sum"
        )  # travels during the forward
        agreement: StepControl | None = None
        if (
            self.stateful
            or isinstance(self.parallel_model, PipelineModel)
            or not all(batch.tensors for batch in batches)
        ):
            # A forward pass may change buffers, so that one must not begin which is not to be finished.
            agreement = self._read_control(step, batches, asked.wait())  # raises where there is nothing to compute on
        clock.enter("copy")
        inputs = [tuple(map(self.world.to_device, self.parallel_model.take(batch.tensors))) for batch in batches]
        total = torch.zeros((), device=self.world.device, dtype=self.precision.weights)
        if isinstance(self.parallel_model, PipelineModel):
            assert agreement is not None
            self._through_stages(self.parallel_model, inputs, agreement, total, clock)
            clock.enter("sync")
            return agreement, self.world.all_reduce(total, "loss sum").wait()
        for index, micro_batch in enumerate(inputs):
            last = index == len(inputs) - 1
            with self.parallel_model.micro_step(last):
                clock.enter("forward")
                with self.precision.autocast():
                    losses, _ = self.parallel_model(*micro_batch)
                if agreement is None:
                    clock.enter("sync")
                    agreement = self._read_control(step, batches, asked.wait())
                if clock.enter("backward") == "nan":
                    losses = losses * float("nan")
                # Divided by the count over all ranks and micro-steps, here and nowhere else; ranks are summed.
                mean = losses / max(1, agreement.tokens)
                if self.reports_loss:
                    total += mean.detach()
                if last:
                    summing = self.world.all_reduce(total, "loss sum")  # travels while the last backward runs
                    self.parallel_model.on_last_bucket = lambda: clock.enter("sync")
                (mean * self.precision.scale).backward()
        clock.enter("sync")
        assert agreement is not None
        return agreement, summing.wait()

    def _through_stages(
        self,
        pipe: PipelineModel,
        inputs: list[tuple[Tensor, ...]],
        agreement: StepControl,
        total: Tensor,
        clock: StepClock,
    ) -> None:
        """Forward and backward of all micro-batches, in the order of a schedule."""
        poison = 1.0

        def enter(phase: str) -> None:
            nonlocal poison
            if clock.enter(phase) == "nan":
                poison = float("nan")

        def weigh(losses: Tensor) -> Tensor:
            mean = losses * poison / max(1, agreement.tokens)
            if self.reports_loss:
                total.add_(mean.detach().sum())
            return mean * self.precision.scale

        with pipe.micro_step(last=True):
            self.in_flight = pipe.run(inputs, weigh, enter, self.precision.autocast)
        total.mul_(poison)  # also where no loss is computed, or all losses were before the first backward

    def warmup_backward(self, first: Callable[[], MicroBatch]) -> None:
        """Where there is DDP, a backward pass that is thrown away. DDP settles its buckets, and with them the order of
        its sums, after its first: a resumed run must begin with the order in which an uninterrupted one would go on.
        """
        self.world.heartbeat.enter("rehearse")
        if not isinstance(self.parallel_model, DDPModel):
            return
        batch, module = first(), self.parallel_model.module
        if not all(row[0] for row in self.world.all_gather_ints(bool(batch.tensors), name="rehearsal")):
            return  # a sample that cannot be decoded: the first step will say so
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._seed(0)
        with self.precision.autocast():
            losses, _ = self.parallel_model(*map(self.world.to_device, self.parallel_model.take(batch.tensors)))
        losses.backward()
        self.optimizer.zero()
        self.expert_balancer.forget()
        self.parallel_model.pop_gradient_reduction()
        self.parallel_model.buckets.clear()  # DDP makes others now
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _local_square(
        self, traffic: GradientReduction, agreement: StepControl, batches: list[MicroBatch], norm: Tensor
    ) -> Tensor:
        """The square of this rank's own mean gradient, before it met the others'; not a number where only their sum is
        known, or the rank had a piece of its samples alone.
        """
        if traffic.local_square is None or self.parallel_model.forward_is_collective:
            return torch.full_like(norm, float("nan"))
        own = sum(batch.valid_targets for batch in batches)
        return traffic.local_square * (agreement.tokens / max(1, own)) ** 2

    def _seed(self, step: int) -> None:
        """Dropout and the like draw from a generator seeded anew each step: a function of position."""
        seed = step_seed(self.seed, step, self.coordinate)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed walks the stack where CUDA is not started: 0.4 ms
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _control_vector(self, step: int, batches: list[MicroBatch]) -> list[int]:
        bad = sum(len(batch.bad_samples) for batch in batches)
        seen = self.signal_seen()
        stops = [seen == signal.SIGINT, seen == signal.SIGTERM]
        own = [sum(b.valid_targets for b in batches), bad, int(bad > 0)] if self.counts_tokens else [0, 0, 0]
        used = self.optimizer.used & 0xFFFF
        return [*own, *stops, *self.saving(step + 1), used, used**2]

    def _read_control(self, step: int, batches: list[MicroBatch], sums: Tensor) -> StepControl:
        """Every rank hears the same sums, so every rank stops at the same step or none does."""
        tokens, bad, bad_ranks, interrupted, terminated, save, saved, used, squares = sums.tolist()
        if squares * self.world.size != used**2:  # equal on all ranks, or not
            raise parameter_use_error(self.world.rank, step - 1)
        if bad and not self.quarantine:
            own: list[BadSample] = [sample for batch in batches for sample in batch.bad_samples]
            if own:
                raise DataError(
                    f"rank {self.world.rank} step {step}: {own[0]}",
                    'mend the sample, or set data.on_bad_sample = "quarantine"',
                )
            raise PeerError(
                f"rank {self.world.rank} step {step}: {bad_ranks} other rank(s) met a sample that cannot be decoded"
            )
        if interrupted or terminated:
            raise StoppedBySignal(signal.SIGINT if interrupted else signal.SIGTERM, step)
        return StepControl(tokens, bad, bool(save), bool(saved))


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the step's clock has passed; nothing waits for it here."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def parameter_use_error(rank: int, step: int) -> NumericsError:
    """FSDP2 has then added up gradients of different parameters; DDP would have waited for ever."""
    return NumericsError(
        f"rank {rank} step {step}: ranks did not use the same parameters, and gradients of different ones were summed",
        "set ddp.find_unused_parameters = true",
    )


def step_seed(seed: int, step: int, coordinate: int) -> int:
    digest = hashlib.blake2b(f"{seed}/step/{step}/data/{coordinate}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def flip_bit(module: torch.nn.Module) -> None:
    """A silent fault, when asked for: one bit of the first parameter."""
    first = local_tensor(next(module.parameters())).reshape(-1)
    bits = first.view({8: torch.int64, 4: torch.int32}[first.element_size()])
    bits[0] ^= 1 << 12
