"""One optimizer step: fetch, copy, forward, backward, sync, update. A step completes on every rank or on none."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.data.loader import BadSample, MicroBatch
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.context_parallel.start_check import check_context_parallel
from meshwright.core.parallel.data_parallel.rank_agreement import ModelUse, use_error
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.parallel.parallel_model import (
    GradientReduction,
    InFlightTracker,
    ParallelModel,
    PassHooks,
    stateful_buffers,
)
from meshwright.core.parallel.world import PendingAllReduce, World
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.trainer.callbacks.callback import StopRequested
from meshwright.core.trainer.expert_balancer import ExpertBalancer
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.measures import find_measures
from meshwright.errors import DataError, PeerError, StoppedBySignal


@dataclass
class StepContext:
    """The parts that a rank's steps work with."""

    parallel_model: ParallelModel
    optimizer: Optimizer
    precision: Precision
    world: World
    expert_balancer: ExpertBalancer
    seed: int = 0
    data_coordinate: int = 0
    """the position among the data-parallel ranks; ranks with the same one read the same samples"""
    pipeline_ranks: int = 1
    pipeline_rank: int = 0
    counts_tokens: bool = True
    """whether this rank's tokens enter the global count: one of the ranks that read the same samples does"""
    reports_loss: bool = True
    """whether this rank's loss enters the global sum: one of the ranks that compute the same loss does"""
    quarantine: bool = False
    """whether samples that cannot be decoded are left out instead of stopping the run"""
    signal_seen: Callable[[], int] = lambda: 0
    """the number of the signal that this rank has received, or 0"""
    save_state: Callable[[int], tuple[bool, bool, bool]] = lambda _done: (False, False, False)
    """for a number of completed steps: (a checkpoint is due, the previous save has finished, a snapshot is due)"""
    before_update: Callable[[], None] = lambda: None
    """called before parameters or optimizer state are written: a checkpoint may still be copied from them"""
    stop_requested: Callable[[], bool] = lambda: False
    """whether a callback of this rank has asked the run to end"""
    on_gradient: Callable[[int, list[MicroBatch]], None] = lambda _step, _batches: None
    """called with the step and its micro-batches once every parameter has its gradient"""

    @classmethod
    def for_rank(
        cls,
        config: RunConfig,
        layout: Layout,
        world: World,
        parallel_model: ParallelModel,
        optimizer: Optimizer,
        precision: Precision,
    ) -> StepContext:
        """Builds the context of this rank in a layout."""
        return cls(
            parallel_model,
            optimizer,
            precision,
            world,
            ExpertBalancer(parallel_model.module, config, world),
            seed=config.seed,
            data_coordinate=layout.data_coordinate(world.rank),
            pipeline_ranks=layout.pipeline,
            pipeline_rank=layout.coordinates(world.rank)["pipeline"],
            counts_tokens=layout.counts_tokens(world.rank),
            # Tensor-parallel ranks compute the same loss, and only a pipeline's last stage computes one.
            reports_loss=parallel_model.has_loss and layout.is_first_on(world.rank, ["tensor"]),
            quarantine=config.data.on_bad_sample == "quarantine",
        )


@dataclass
class StepControl:
    """The summed step control vector: what every rank knows of a step before any rank changes a parameter."""

    tokens: int
    """valid tokens of the global batch"""
    bad_samples: int
    save_due: bool = False
    """a checkpoint is due once this step is done"""
    save_finished: bool = False
    """the previous save has finished"""
    snapshot_due: bool = False
    """a snapshot in the memory of the hosts is due once this step is done"""


@dataclass
class StepOutcome:
    """The results of a step, to be read once its clock has passed."""

    step: int
    lr: float
    control: StepControl
    numbers: Tensor
    """loss, gradient norm, squared norm of this rank's local gradient, finite, loss scale"""
    reduction: GradientReduction
    clock: StepClock
    batches: list[MicroBatch]
    counted: bool = False
    """whether the communication and memory counters were on, which makes a step slower"""
    profiled: bool = False
    """whether torch.profiler was on, which makes a step slower"""
    in_flight: InFlightTracker | None = None
    """the micro-batches that this rank kept during a pipeline schedule"""
    measured: Tensor | None = None
    """the parts of the loss and the metrics as (sum, count) over all ranks, see `Measures`"""
    expert_loads: Tensor | None = None
    """tokens per expert over all ranks, see `ExpertBalancer.update_biases`"""
    facts: dict[str, float] = field(default_factory=dict)
    """what is known of the batch beside its tensors, for the metrics of the step; equal on all ranks"""


class Step:
    """Runs optimizer steps on one rank."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.parallel_model, self.optimizer = context.parallel_model, context.optimizer
        self.precision, self.world = context.precision, context.world
        self.expert_balancer = context.expert_balancer
        self.has_stateful_buffers = any(True for _ in stateful_buffers(self.parallel_model.module))
        self.in_flight: InFlightTracker | None = None
        objective = find_measures(self.parallel_model.module)
        self.objective = objective if objective is not None and objective.measured_length else None
        self.measured: Tensor | None = None
        self.block_calls = 0
        """the order in which the last step called the blocks, see `ParallelModel.pop_block_calls`"""

    def run(
        self,
        step: int,
        lr: float,
        batches_by_step: Iterator[list[MicroBatch]],
        on_phase: Callable[[str], None] = lambda _phase: None,
    ) -> StepOutcome:
        """Fetches the step's micro-batches, computes the gradient of the global mean loss, and updates once."""
        clock = StepClock(self.world.device, self.world.heartbeat, step, on_phase)

        if clock.enter("fetch") == "flip":
            self.context.before_update()
            flip_bit(next(iter(self.parallel_model.master_parameters().values())))
        batches = next(batches_by_step)

        control, loss = self.gradient(step, batches, clock)  # copy, forward, backward, sync

        self.context.on_gradient(step, batches)

        clock.enter("update")
        scale = self.precision.scale
        norm = self.optimizer.gradient_norm() / scale
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self.context.before_update()
        self.optimizer.update(lr, norm, scale, finite)
        self.parallel_model.after_update()
        self.optimizer.zero_grad(in_place=self.parallel_model.zero_in_place and len(batches) > 1)
        loads = self.expert_balancer.update_biases(finite)
        if self.precision.scaler:
            self.precision.scaler.update(finite)
        reduction = self.parallel_model.pop_gradient_reduction()
        local = self._local_square(reduction, control, batches, norm) / scale**2
        on_host = copy_to_host(torch.stack([t.double() for t in (loss, norm, local, finite, scale)]))
        loads = copy_to_host(loads) if loads is not None else None
        measured = copy_to_host(self.measured) if self.measured is not None else None
        clock.close()
        return StepOutcome(
            step,
            lr,
            control,
            on_host,
            reduction,
            clock,
            batches,
            in_flight=self.in_flight,
            measured=measured,
            expert_loads=loads,
        )

    def gradient(self, step: int, batches: list[MicroBatch], clock: StepClock) -> tuple[StepControl, Tensor]:
        """Leaves in every parameter the gradient of (sum of token losses) / (number of valid tokens) over the global
        batch, and returns that loss.
        """
        self._seed(step)
        if self.objective is not None:
            self.objective.measured.clear()  # a pass outside of a step may have left something
        self.expert_balancer.begin_step(self.precision.scale, self.precision.parameters)
        if faults.fail_point("step.collective", step) == "desync":
            self.world.all_reduce(torch.zeros(7), "injected all-reduce").wait()
        # The step control vector is summed while the forward pass runs. Where a forward pass may not be abandoned
        # (stateful buffers, pipelines) or cannot start (bad samples), its sum is read first.
        control_sum = self.world.all_reduce_ints(*self._control_vector(step, batches), name="step control vector")
        control: StepControl | None = None
        if (
            self.has_stateful_buffers
            or self.parallel_model.interleaves_backward
            or not all(batch.tensors for batch in batches)
        ):
            control = self._read_control(step, batches, control_sum.wait())

        clock.enter("copy")
        inputs = [tuple(map(self.world.to_device, self.parallel_model.shard_inputs(b.tensors))) for b in batches]
        total = torch.zeros((), device=self.world.device, dtype=self.precision.parameters)
        loss_sum: PendingAllReduce | None = None
        injected_nan = False

        def enter(phase: str) -> None:
            nonlocal control, injected_nan
            if phase == "backward" and control is None:
                clock.enter("sync")
                control = self._read_control(step, batches, control_sum.wait())
            injected_nan |= clock.enter(phase) == "nan"

        def scale_loss(losses: Tensor) -> Tensor:
            assert control is not None
            if injected_nan:
                losses = losses * float("nan")
            # Distributed correctness: the sum of token losses is divided by the token count over all ranks and
            # micro-batches, here and nowhere else; losses and gradients are then summed over ranks, never averaged.
            mean = losses / max(1, control.tokens)
            if self.context.reports_loss:
                total.add_(mean.detach())
            return mean * self.precision.scale

        def sum_loss() -> None:  # overlaps with the last backward pass
            nonlocal loss_sum
            loss_sum = self.world.all_reduce(self._with_measured(total), "loss sum")

        hooks = PassHooks(enter, self.precision.autocast, scale_loss, sum_loss)
        self.parallel_model.pop_block_calls()  # those of an evaluation
        self.in_flight = self.parallel_model.forward_backward(inputs, hooks)
        self.block_calls = self.parallel_model.pop_block_calls()

        clock.enter("sync")
        if loss_sum is None:  # a pipeline: not every rank computes a loss
            if injected_nan:
                total.mul_(float("nan"))
            sum_loss()
        assert control is not None
        assert loss_sum is not None
        if self.objective is None:
            return control, loss_sum.wait()
        loss, self.measured = loss_sum.wait().tensor_split([1])
        return control, loss[0]

    def _with_measured(self, total: Tensor) -> Tensor:
        """Appends what the objective measured to the loss, so that one all-reduce sums both."""
        if self.objective is None:
            return total
        measured = self.objective.pop_measured(self.world.device)
        return torch.cat([total.double()[None], measured if self.context.reports_loss else torch.zeros_like(measured)])

    def check_context(self, first: Callable[[], MicroBatch]) -> None:
        """Compares a user's model on sequence chunks with itself on full sequences."""
        context = self.parallel_model.context
        if context is None or not context.is_custom:
            return
        self.world.heartbeat.enter("warmup")
        batch = first()
        if all(row[0] for row in self.world.all_gather_ints(bool(batch.tensors), name="context check")):
            tensors = tuple(map(self.world.to_device, batch.tensors))
            check_context_parallel(self.parallel_model, tensors, self.precision.autocast)
        if self.objective is not None:
            self.objective.pop_measured(self.world.device)

    def warmup_backward(self, first: Callable[[], MicroBatch]) -> None:
        """Runs the warm-up backward of models that need one (DDP) and discards what it leaves behind."""
        self.world.heartbeat.enter("warmup")
        self.parallel_model.warmup_backward(lambda: self.load_first(first), self.precision.autocast)
        self.discard_pass()

    def load_first(self, first: Callable[[], MicroBatch]) -> tuple[Tensor, ...] | None:
        """The first micro-batch on the device; None if a rank cannot decode it, which the first step reports."""
        self.world.heartbeat.enter("warmup")
        batch = first()
        if not all(row[0] for row in self.world.all_gather_ints(bool(batch.tensors), name="warm-up backward")):
            return None
        self._seed(0)
        return tuple(map(self.world.to_device, self.parallel_model.shard_inputs(batch.tensors)))

    def discard_pass(self) -> None:
        """Discards what a pass that belongs to no step has left behind."""
        self.optimizer.zero_grad()
        self.expert_balancer.discard_loads()
        self.parallel_model.pop_gradient_reduction()

    def _local_square(
        self, reduction: GradientReduction, control: StepControl, batches: list[MicroBatch], norm: Tensor
    ) -> Tensor:
        """Returns the squared norm of this rank's local mean gradient before the reduction; NaN where only the reduced
        gradient is known, or where the rank has computed on a part of its samples only.
        """
        if reduction.local_square is None or self.parallel_model.forward_is_collective:
            return torch.full_like(norm, float("nan"))
        local_tokens = sum(batch.valid_targets for batch in batches)
        return reduction.local_square * (control.tokens / max(1, local_tokens)) ** 2

    def _seed(self, step: int) -> None:
        """Seeds every generator (dropout uses them) as a function of seed, step and data coordinate."""
        seed = step_seed(self.context.seed, step, self.context.data_coordinate)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed walks the stack where CUDA is not started: 0.4 ms
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _control_vector(self, step: int, batches: list[MicroBatch]) -> list[int]:
        """Returns this rank's step control vector: tokens, bad samples, ranks with bad samples, SIGINT, SIGTERM, save
        due, save finished, snapshot due, stop requested, and for every pipeline rank the hash of its last use of the
        model, and its square.
        """
        bad = sum(len(batch.bad_samples) for batch in batches)
        received = self.context.signal_seen()
        signals = [received == signal.SIGINT, received == signal.SIGTERM]
        counts = [sum(b.valid_targets for b in batches), bad, int(bad > 0)] if self.context.counts_tokens else [0, 0, 0]
        used = self.model_use.short
        uses = [0] * (2 * self.context.pipeline_ranks)  # pipeline ranks have different parameters
        start = 2 * self.context.pipeline_rank
        uses[start : start + 2] = used, used**2
        return [*counts, *signals, *self.context.save_state(step + 1), self.context.stop_requested(), *uses]

    @property
    def model_use(self) -> ModelUse:
        """How this rank ran the model in the last step."""
        return ModelUse(self.optimizer.used_parameters, self.block_calls)

    def _raise_use_error(self, step: int) -> None:
        """Raises on every rank, with the rank that ran the model differently."""
        rows = self.world.all_gather_ints(self.context.pipeline_rank, *self.model_use, name="use of the model")
        error = use_error([ModelUse(*use) for _, *use in rows], [pipeline_rank for pipeline_rank, *_ in rows], step)
        assert error is not None
        raise error

    def _read_control(self, step: int, batches: list[MicroBatch], sums: Tensor) -> StepControl:
        """Reads the summed control vector. It is equal on every rank, so every rank stops at this step or none does."""
        tokens, bad, bad_ranks, interrupted, terminated, due, finished, snapshot, stops, *uses = sums.tolist()
        ranks = self.world.size // self.context.pipeline_ranks
        # Cauchy-Schwarz: equality holds only if all ranks with the same stages have the same hash
        if any(squares * ranks != used**2 for used, squares in zip(uses[::2], uses[1::2], strict=True)):
            self._raise_use_error(step - 1)
        if bad and not self.context.quarantine:
            local: list[BadSample] = [sample for batch in batches for sample in batch.bad_samples]
            if local:
                raise DataError(
                    f"rank {self.world.rank} step {step}: {local[0]}",
                    'try to repair the sample, or set data.on_bad_sample = "quarantine"',
                )
            raise PeerError(
                f"rank {self.world.rank} step {step}: {bad_ranks} other rank(s) have a sample that cannot be decoded"
            )
        if interrupted or terminated:
            raise StoppedBySignal(signal.SIGINT if interrupted else signal.SIGTERM, step)
        if stops:
            raise StopRequested
        return StepControl(tokens, bad, bool(due), bool(finished), bool(snapshot))


def copy_to_host(tensor: Tensor) -> Tensor:
    """Starts an asynchronous copy to pinned memory; it is complete once the step's clock has passed."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def step_seed(seed: int, step: int, coordinate: int) -> int:
    """The random seed of a step on the ranks with this data coordinate."""
    digest = hashlib.blake2b(f"{seed}/step/{step}/data/{coordinate}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def flip_bit(parameter: Tensor) -> None:
    """Injects a silent fault: flips one bit of a parameter."""
    first = local_tensor(parameter).reshape(-1)
    bits = first.view({8: torch.int64, 4: torch.int32}[first.element_size()])
    bits[0] ^= 1 << 12
