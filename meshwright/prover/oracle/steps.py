"""The steps of a training run by their definition, for any model that gives a loss and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.prover.oracle.optimizer import (
    ReferenceLossScale,
    ReferenceState,
    clip_factor,
    global_norm,
    learning_rate,
    router_bias,
)
from meshwright.prover.oracle.sampler import Sampler
from meshwright.prover.oracle.update_rules import DECODER_BLOCKS, ReferenceOptimizer
from meshwright.prover.trace import StepTrace, Trace

Read = Callable[[Sequence[int]], Any]
"""sample ids -> the batch of these samples, as a model takes it"""


class TrainedModel(Protocol):
    """What a model computes in a step."""

    def gradient(
        self, parameters: dict[str, Tensor], batch: Any, scale: float, step: int, /
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """(mean loss, its gradient for every parameter that has one, load of every router). `scale` is the loss scale,
        which the gradient no longer has.
        """
        ...

    def evaluate(self, parameters: dict[str, Tensor], batch: Any, /) -> tuple[float, int]:
        """(mean loss, number of valid targets) of held-out samples."""
        ...

    def count_valid_targets(self, batch: Any, /) -> int:
        """The number of targets that count in the loss."""
        ...

    def inputs(self, batch: Any, /) -> dict[str, Tensor]:
        """The entries of a batch by name."""
        ...


def train_steps(
    config: RunConfig,
    model: TrainedModel,
    state: ReferenceState,
    read: Read,
    lengths: Sequence[int],
    *,
    steps: range,
    dtype: torch.dtype = torch.float64,
    nonfinite_steps: frozenset[int] = frozenset(),
    blocks: tuple[str, ...] = DECODER_BLOCKS,
) -> Trace:
    """Trains for `steps` from a state, and evaluates as the config says. `dtype` is that of parameters and optimizer
    state. The `nonfinite_steps` have a loss that is not a number, so their updates are skipped. `blocks` are the names
    of the model's blocks.
    """
    optimizer = ReferenceOptimizer.of_run(config, blocks)
    sampler = Sampler.from_config(config, lengths)
    state = replace(
        state,
        parameters={name: value.detach().to(dtype) for name, value in state.parameters.items()},
        loss_scale=state.loss_scale or ReferenceLossScale.from_config(config.precision),
    )
    trace = Trace(dict(state.parameters))
    held_out = sampler.evaluated(config.eval.samples) if config.eval.every else []
    for step in steps:
        record, state = run_step(
            config, model, optimizer, state, step, read(sampler.step(step)), step in nonfinite_steps
        )
        trace.steps.append(record)
        if held_out and ((step + 1) % config.eval.every == 0 or step + 1 == config.steps):
            trace.evaluations.append((step, *model.evaluate(state.parameters, read(held_out))))
    trace.moments = {f"{name}/{key}": value for name, of in state.moments.items() for key, value in of.items()}
    return trace


def run_step(
    config: RunConfig,
    model: TrainedModel,
    optimizer: ReferenceOptimizer,
    state: ReferenceState,
    step: int,
    batch: Any,
    nonfinite: bool,
) -> tuple[StepTrace, ReferenceState]:
    """One optimizer step. A step whose loss or gradient is not finite changes nothing but the loss scale. A parameter
    without a gradient is not updated, nor is a frozen one.
    """
    assert state.loss_scale is not None
    scale, parameters = state.loss_scale.scale, state.parameters
    loss, all_gradients, loads = model.gradient(parameters, batch, scale, step)
    gradients = {name: gradient for name, gradient in all_gradients.items() if not optimizer.is_frozen(name)}
    if nonfinite:
        loss, gradients = math.nan, {name: gradient * math.nan for name, gradient in gradients.items()}
    norm = global_norm(gradients)
    finite = math.isfinite(norm) and math.isfinite(loss)
    lr = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
    updated, moments = dict(parameters), dict(state.moments)
    if finite:
        factor = clip_factor(norm, config.optimizer.clip)
        for name, gradient in gradients.items():
            before = moments.get(name, {})
            updated[name], moments[name] = optimizer.update(name, parameters[name], gradient * factor, before, lr)
        for name in (
            all_gradients.keys() - gradients.keys()
        ):  # a recorded state is float64, and so are updated parameters
            updated[name] = parameters[name].to(updated[next(iter(gradients))].dtype)
        for name, load in loads.items():
            updated[name] = router_bias(parameters[name], load, config.model.router_bias_rate)
    record = StepTrace(
        step, loss, norm, lr, model.count_valid_targets(batch), model.inputs(batch), gradients, dict(updated)
    )
    return record, ReferenceState(updated, moments, state.loss_scale.after(finite))
