"""Computes the reference traces and tolerances of proof runs in a process of their own.

A run in float64 is compared over its whole length. A run in lower precision is followed step by step: the reference
computes each step from the state that the run had before it, because rounding errors would grow from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.base.config import Batch, RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_fsdp
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.parallel.world import World
from meshwright.prover.compare.discrepancy import compare_traces
from meshwright.prover.compare.noise import Tolerances
from meshwright.prover.compare.updates import states_by_name
from meshwright.prover.oracle.optimizer import ReferenceLossScale, ReferenceState
from meshwright.prover.oracle.steps import TrainedModel
from meshwright.prover.oracle.training import Compression, Passes, ReferenceModel, train
from meshwright.prover.oracle.update_rules import DECODER_BLOCKS
from meshwright.prover.trace import StepTrace, Trace
from meshwright.prover.tracer import AssembledTrace

NOISE_SEEDS = 3
"""How often the rounding noise of a low precision is measured; float64 needs one measurement."""
JITTER = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-12, "fp16": 2.0**-15, "fp8": 2.0**-7}
"""Relative change of the parameters that makes one measurement round differently from another; it is far below the
rounding of the precision."""

Reference = tuple[Trace, Tolerances, list[Mapping[str, Tensor]] | None]
"""The exact trace, the tolerances, and the states from which each step was computed; None: the reference's own."""


@dataclass(frozen=True)
class ReferenceTask:
    """A proof run that is computed by the reference."""

    config: RunConfig
    sources: list[Source]
    nonfinite_steps: frozenset[int] = field(default_factory=frozenset)
    """Steps whose loss is not finite."""
    pass_samples: int | None = None
    """Samples per forward pass in global order; only a capacity depends on it and on `replicas`."""
    replicas: int = 1
    first_step: int = 0

    @property
    def follows_run(self) -> bool:
        """Whether each step is computed from the state of the run."""
        return self.config.precision.compute != "fp64"

    def on_layout(self, _config: RunConfig, _batch: Batch) -> ReferenceTask:
        """The reference of the same run on another layout: the definition of a built-in model does not depend on it."""
        return self

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the model's blocks."""
        return DECODER_BLOCKS

    @property
    def tied(self) -> Mapping[str, tuple[str, ...]]:
        """The other names of tied parameters of a custom model."""
        return {}

    @property
    def noise_precision(self) -> str:
        """The lowest precision that the run computes in."""
        return "fp8" if self.config.precision.float8 else self.config.precision.compute

    def train(self, config: RunConfig | None = None, steps: range | None = None, **options: Any) -> Trace:
        source = ConcatenatedSource(self.sources)

        config = config or self.config
        lengths = [len(part) for part in self.sources]
        steps = range(self.first_step, config.steps) if steps is None else steps
        options = {
            "nonfinite_steps": self.nonfinite_steps,
            "pass_samples": self.pass_samples,
            "replicas": self.replicas if self.pass_samples else 1,
        } | options
        return train(config, source.__getitem__, lengths, steps=steps, **options)

    def rounding(self) -> dict[str, Any]:
        """What makes the reference round as the run does."""
        compute = self.config.precision.compute
        options: dict[str, Any] = {"dtype": torch.float32}
        if self.config.ddp.comm_hook == "bf16_compress":
            options["compression"] = Compression(torch.bfloat16, self.replicas)
        if compute == "fp32":
            return options
        low = torch.bfloat16 if compute == "bf16" else torch.float16
        sharded = uses_fsdp(Layout.from_config(self.config.layout))
        return options | {"autocast": low, "low_precision_units": sharded}

    def run(self, measured: AssembledTrace | None) -> Reference:
        """The reference of a run, which must be given if the reference follows it."""
        if not self.follows_run:
            exact = self.train()
            noise = [compare_traces(exact, self.train(permute=True))]
            return exact, Tolerances.from_noise("fp64", noise), None
        assert measured is not None
        return self.follow(measured)

    def follow(self, measured: AssembledTrace) -> Reference:
        """Computes every step of a run from the state that the run had before it."""
        exact = self.train(steps=range(0))
        rounded = [Trace(exact.initial) for _ in range(NOISE_SEEDS)]
        states: list[Mapping[str, Tensor]] = []
        loss_scale = ReferenceLossScale.from_config(self.config.precision)
        for state, step in recorded_states(measured):
            states.append(state.parameters)
            state = replace(state, loss_scale=loss_scale)
            if self.overflows(state, step):
                exact.steps.append(skipped_step(self.one_step(state, step).steps[0], state))
            else:
                extend(exact, self.one_step(state, step))
                skipped = step.step in self.nonfinite_steps
                for seed, trace in enumerate(rounded):
                    start = state if skipped else self.jitter(state, seed)  # a skipped step changes nothing at all
                    start = replace(start, loss_scale=small_scale(loss_scale))
                    extend(trace, self.one_step(start, step, permute=seed % 2 == 1, **self.rounding()))
            exact.steps[-1].loss_scale = loss_scale.scale
            loss_scale = loss_scale.after(isfinite(step.grad_norm))
        finite = {step.step for step in rounded[0].steps}
        compared = Trace(exact.initial, [s for s in exact.steps if s.step in finite], exact.evaluations)
        compared_states = [before for before, s in zip(states, exact.steps, strict=True) if s.step in finite]
        noise = [compare_traces(compared, trace, compared_states) for trace in rounded]
        experts = bool(self.config.model.experts)
        return exact, Tolerances.from_noise(self.noise_precision, noise, common=experts), states

    def one_step(self, state: ReferenceState, step: StepTrace, **options: Any) -> Trace:
        return self.train(steps=range(step.step, step.step + 1), start=state, **options)

    def jitter(self, state: ReferenceState, seed: int) -> ReferenceState:
        """The state with parameters that differ by less than rounding."""
        generator = torch.Generator().manual_seed(seed)
        size = JITTER[self.noise_precision]
        parameters = {
            name: value * (1 + size * torch.randn(value.shape, generator=generator, dtype=torch.float64))
            if not name.endswith("router.bias")
            else value
            for name, value in state.parameters.items()
        }
        return replace(state, parameters=parameters)

    def overflows(self, state: ReferenceState, step: StepTrace) -> bool:
        """Whether the run skipped a step because fp16 overflows there: the rounded reference must overflow too."""
        if isfinite(step.grad_norm) or step.step in self.nonfinite_steps or self.config.precision.compute != "fp16":
            return False
        return not isfinite(self.one_step(state, step, **self.rounding()).steps[0].grad_norm)

    def micro_batches(self, step: StepTrace, accumulation: int) -> tuple[TrainedModel, list[Any]]:
        """The model in float64, and the micro-batches of a step in global order."""
        inputs = [entry.long() for entry in step.inputs.values()]
        micro = len(inputs[0]) // (self.replicas * accumulation)
        parts = list(zip(*(entry.split(micro) for entry in inputs), strict=True))
        return ReferenceModel(self.config, None, Passes(micro)), parts

    def stale_loss(self) -> float:
        """The loss of step 1 if step 0 updates nothing."""
        still = replace(self.config, optimizer=replace(self.config.optimizer, lr=0.0))
        return self.train(still, nonfinite_steps=frozenset()).steps[1].loss


def recorded_states(measured: AssembledTrace) -> Iterator[tuple[ReferenceState, StepTrace]]:
    """The state before each step of a run, and the step."""
    parameters = measured.trace.initial
    for moments, step in zip(measured.moments, measured.trace.steps, strict=False):
        yield (
            ReferenceState({name: value.double() for name, value in parameters.items()}, states_by_name(moments)),
            step,
        )
        parameters = step.parameters


def extend(trace: Trace, one_step: Trace) -> None:
    """Appends a step that was computed by itself."""
    one_step.steps[0].moments = one_step.moments
    trace.steps += one_step.steps
    trace.evaluations += one_step.evaluations


def skipped_step(step: StepTrace, state: ReferenceState) -> StepTrace:
    """A step with the right loss whose update is skipped."""
    return replace(step, grad_norm=float("nan"), gradients={}, parameters=state.parameters, moments={})


def small_scale(loss_scale: ReferenceLossScale) -> ReferenceLossScale:
    """A loss scale at which fp16 does not overflow, for the measurement of noise."""
    return replace(loss_scale, scale=max(1.0, loss_scale.scale / 64))


def compute_references(
    _world: World, tasks: Sequence[ReferenceTask], measured: Sequence[AssembledTrace | None]
) -> list[Reference]:
    """Runs in a process of its own: autograd in the launcher would initialize CUDA, which does not survive a fork."""
    return [task.run(trace) for task, trace in zip(tasks, measured, strict=True)]


def compute_stale_loss(_world: World, task: ReferenceTask) -> float:
    return task.stale_loss()


def fit_sample_weights(
    _world: World, task: ReferenceTask, step: StepTrace, before: dict[str, Tensor], names: list[str], accumulation: int
) -> tuple[Tensor, float]:
    """The gradients of a step as a weighted sum of those of its micro-batches: the weights, (data-parallel rank,
    micro-batch), and the relative error of the sum. All weights of a correct step are 1.
    """
    parameters = {name: value.double() for name, value in before.items()}
    model, parts = task.micro_batches(step, accumulation)
    valid, columns = max(1, sum(model.count_valid_targets(part) for part in parts)), []
    for part in parts:
        _, gradients, _ = model.gradient(parameters, part, 1.0, step.step)
        share = model.count_valid_targets(part) / valid
        zeros = {name: torch.zeros_like(parameters[name]) for name in names}
        columns.append(share * torch.cat([(zeros | gradients)[name].flatten() for name in names]))
    matrix, found = torch.stack(columns, 1), torch.cat([step.gradients[name].double().flatten() for name in names])
    if not matrix.isfinite().all() or not found.isfinite().all():
        return torch.full((task.replicas, accumulation), float("nan")), float("inf")
    weights = torch.linalg.lstsq(matrix, found[:, None], driver="gelsd").solution
    error = float((matrix @ weights - found[:, None]).norm() / found.norm().clamp(min=1e-300))
    return weights.view(task.replicas, accumulation), error
