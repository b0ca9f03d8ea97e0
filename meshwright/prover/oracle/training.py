"""A whole training run by its definition: samples, losses, gradients, updates and evaluations, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.config import IGNORE_INDEX, RunConfig
from meshwright.errors import ConfigError
from meshwright.prover.oracle.decoder import LONG_SEQUENCE, Parameters, ReferenceDecoder
from meshwright.prover.oracle.equivalent_model import equivalent_parameters
from meshwright.prover.oracle.initial_values import initial_values
from meshwright.prover.oracle.optimizer import (
    Moments,
    ReferenceLossScale,
    ReferenceState,
    adamw,
    clip_factor,
    global_norm,
    learning_rate,
    router_bias,
)
from meshwright.prover.oracle.sampler import Sampler
from meshwright.prover.trace import StepTrace, Trace

Read = Callable[[int], tuple[NDArray[Any], NDArray[Any]]]
"""sample id -> (tokens, labels)"""

ELEMENTS_PER_PASS = 1 << 25
"""Activations that a forward pass keeps, at most; a pass has at least one sample."""


@dataclass(frozen=True)
class Passes:
    """How the samples of a step or an evaluation are divided into forward passes; only a capacity makes it matter."""

    samples: int
    replicas: int = 1
    """data-parallel degree: an evaluation gives every replica each `replicas`-th sample"""
    permute: bool = False
    """computes the samples in another order and with an equivalent model, which changes results by rounding only"""


@dataclass(frozen=True)
class Compression:
    """How ranks sum their gradients: each rounds its own to `dtype`, and so is every sum. The ranks have equal parts of
    the batch.
    """

    dtype: torch.dtype | None = None
    ranks: int = 1


def train(
    config: RunConfig,
    read: Read,
    lengths: Sequence[int],
    *,
    steps: range,
    start: ReferenceState | None = None,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
    nonfinite_steps: frozenset[int] = frozenset(),
    permute: bool = False,
    pass_samples: int | None = None,
    replicas: int = 1,
    low_precision_units: bool = False,
    compression: Compression = Compression(),  # noqa: B008  immutable
) -> Trace:
    """Trains for `steps`, from `start` or from the initial values, and evaluates as the config says.

    `dtype` is that of parameters and optimizer state, `autocast` that of matrix products. The `nonfinite_steps` have a
    loss that is not a number, so their updates are skipped. With a capacity, `pass_samples` (samples per forward pass
    of a rank) and `replicas` (data-parallel degree) decide which tokens are dropped. `low_precision_units`: FSDP2
    unshards every parameter in the autocast dtype, except for the unit with the embedding. `permute` changes the
    results by rounding only, to measure its size.
    """
    if config.model.experts and config.model.capacity_factor and pass_samples is None:
        raise ConfigError(
            "model.capacity_factor drops tokens per forward pass, and the samples of a pass are not known",
            "expected pass_samples",
        )
    sampler = Sampler.from_config(config, lengths)
    per_pass = pass_samples if pass_samples and config.model.capacity_factor else samples_per_pass(config)
    model = ReferenceModel(config, autocast, Passes(per_pass, replicas, permute), low_precision_units)
    model.compression = compression
    state = start or ReferenceState(initial_values(config))
    state = replace(
        state,
        parameters={name: value.detach().to(dtype) for name, value in state.parameters.items()},
        loss_scale=state.loss_scale or ReferenceLossScale.from_config(config.precision),
    )
    trace = Trace(dict(state.parameters))
    held_out = sampler.evaluated(config.eval.samples) if config.eval.every else []
    for step in steps:
        record, state = run_step(
            config, model, state, step, read_all(read, sampler.step(step)), step in nonfinite_steps
        )
        trace.steps.append(record)
        if held_out and ((step + 1) % config.eval.every == 0 or step + 1 == config.steps):
            trace.evaluations.append((step, *model.evaluate(state.parameters, *read_all(read, held_out))))
    for name, moments in state.moments.items():
        updates = torch.tensor(float(moments.updates))
        trace.moments |= {
            f"{name}/exp_avg": moments.first,
            f"{name}/exp_avg_sq": moments.second,
            f"{name}/step": updates,
        }
    return trace


def run_step(
    config: RunConfig,
    model: ReferenceModel,
    state: ReferenceState,
    step: int,
    batch: tuple[Tensor, Tensor],
    nonfinite: bool,
) -> tuple[StepTrace, ReferenceState]:
    """One optimizer step. A step whose loss or gradient is not finite changes nothing but the loss scale."""
    assert state.loss_scale is not None
    scale, parameters = state.loss_scale.scale, state.parameters
    loss, gradients, loads = model.gradient(parameters, *batch, scale)
    if nonfinite:
        loss, gradients = math.nan, {name: gradient * math.nan for name, gradient in gradients.items()}
    norm = global_norm(gradients)
    finite = math.isfinite(norm) and math.isfinite(loss)
    lr = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
    updated, moments = dict(parameters), dict(state.moments)
    if finite:
        factor = clip_factor(norm, config.optimizer.clip)
        for name, gradient in gradients.items():
            zeros = torch.zeros_like(gradient)
            before = moments.get(name) or Moments(zeros, zeros)
            updated[name], moments[name] = adamw(parameters[name], gradient * factor, before, lr, config.optimizer)
        for name, load in loads.items():
            updated[name] = router_bias(parameters[name], load, config.model.router_bias_rate)
    tokens = int((batch[1] != IGNORE_INDEX).sum())
    record = StepTrace(step, loss, norm, lr, tokens, *batch, gradients, dict(updated))
    return record, ReferenceState(updated, moments, state.loss_scale.after(finite))


class ReferenceModel:
    """The loss of the decoder over a global batch, and its gradient."""

    def __init__(
        self, config: RunConfig, autocast: torch.dtype | None, passes: Passes, low_precision_units: bool = False
    ) -> None:
        self.config, self.passes = config, passes
        self.decoder = ReferenceDecoder(config.model, autocast)
        self.unit_dtype = autocast if low_precision_units else None
        self.compression = Compression()

    def gradient(
        self, parameters: Parameters, tokens: Tensor, labels: Tensor, scale: float
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """(loss, gradient of every parameter, load of every router). The loss is the sum of the token losses divided by
        the number of valid tokens. The gradient also has the balance loss, whose mean over sequences is multiplied by
        `router_aux_loss`. `scale` is the loss scale, which the gradient no longer has.
        """
        valid = max(1, int((labels != IGNORE_INDEX).sum()))
        gradients: dict[str, Tensor] = {}
        total, loads = 0.0, dict[str, Tensor]()
        for rank in torch.arange(len(tokens)).chunk(self.compression.ranks):
            of_rank: dict[str, Tensor] = {}
            for samples in self.training_passes(len(rank)):
                chosen = rank[samples]
                loss, parts, pass_loads = self.differentiate(
                    parameters, tokens[chosen], labels[chosen], valid, len(tokens), scale
                )
                add_to(of_rank, parts)
                add_to(loads, pass_loads)
                total += loss
            low = self.compression.dtype
            add_to(gradients, of_rank if low is None else {name: part.to(low) for name, part in of_rank.items()})
        return total, {name: part.to(parameters[name].dtype) / scale for name, part in gradients.items()}, loads

    def differentiate(
        self, parameters: Parameters, tokens: Tensor, labels: Tensor, valid: int, batch: int, scale: float
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """The share that some samples have in the loss of a batch with `valid` valid tokens, in its gradient and in
        the loads.
        """
        leaves = {n: p.detach().requires_grad_() for n, p in parameters.items() if not n.endswith("router.bias")}
        result = self.decoder.forward(self.as_used(parameters | leaves), tokens, labels)
        mean = result.token_losses.sum() / valid
        balance = self.config.model.router_aux_loss * result.balance.sum() / batch
        parts = torch.autograd.grad((mean + balance) * scale, list(leaves.values()), materialize_grads=True)
        return float(mean.detach()), dict(zip(leaves, parts, strict=True)), result.loads

    @torch.no_grad()
    def evaluate(self, parameters: Parameters, tokens: Tensor, labels: Tensor) -> tuple[float, int]:
        """(loss, number of valid tokens) of held-out samples."""
        used, total = self.as_used(parameters), 0.0
        for samples in self.evaluation_passes(len(tokens)):
            total += float(self.decoder.forward(used, tokens[samples], labels[samples]).token_losses.double().sum())
        valid = int((labels != IGNORE_INDEX).sum())
        return total / max(1, valid), valid

    def training_passes(self, samples: int) -> Iterator[Tensor]:
        """The sample indices of each forward pass: consecutive slices of the global batch."""
        passes = list(torch.arange(samples).split(self.passes.samples))
        if self.passes.permute:
            passes.reverse()
            if not self.config.model.capacity_factor:
                passes = [indices.flip(0) for indices in passes]
        yield from passes

    def evaluation_passes(self, samples: int) -> Iterator[Tensor]:
        for replica in range(self.passes.replicas):
            yield from torch.arange(samples)[replica :: self.passes.replicas].split(self.passes.samples)

    def as_used(self, parameters: Parameters) -> Parameters:
        """The parameters as a forward pass uses them: those of an equivalent model, and rounded as FSDP2 does."""
        tie = self.config.model.tie
        if self.passes.permute:
            parameters = equivalent_parameters(parameters, tie)
        if self.unit_dtype is None:
            return parameters
        kept = ("embedding.weight", "router.bias", *(["decoder.norm.weight"] if tie else []))
        return {name: p if name.endswith(kept) else p.to(self.unit_dtype) for name, p in parameters.items()}


def add_to(sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part


def samples_per_pass(config: RunConfig) -> int:
    """The samples whose activations fit into ELEMENTS_PER_PASS."""
    model, sequence = config.model, config.data.sequence
    experts = model.experts_active + model.experts_shared if model.experts else 1
    scores = 3 * model.heads * min(sequence, LONG_SEQUENCE)
    per_token = 4 * model.vocab + model.layers * (16 * model.width + 5 * experts * model.ffn + scores)
    return max(1, ELEMENTS_PER_PASS // (sequence * per_token))


def read_all(read: Read, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tokens, labels), each (samples, sequence)."""
    tokens, labels = zip(*(read(sample) for sample in ids), strict=True)
    return tuple(torch.from_numpy(np.stack(column).astype(np.int64)) for column in (tokens, labels))  # type: ignore[return-value]
