"""A whole training run by its definition: samples, losses, gradients, updates and evaluations, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.base.dtypes import rounds_weights
from meshwright.errors import ConfigError
from meshwright.prover.oracle.decoder import LONG_SEQUENCE, Parameters, ReferenceDecoder
from meshwright.prover.oracle.equivalent_model import equivalent_parameters
from meshwright.prover.oracle.initial_values import initial_values
from meshwright.prover.oracle.optimizer import ReferenceState
from meshwright.prover.oracle.steps import train_steps
from meshwright.prover.trace import INPUTS, Trace

Read = Callable[[int], tuple[NDArray[Any], ...]]
"""sample id -> (tokens, labels), and the documents of a packed sample"""
Batch = tuple[Tensor, ...]
"""the same, each (samples, sequence)"""

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
    per_pass = pass_samples if pass_samples and config.model.capacity_factor else samples_per_pass(config)
    model = ReferenceModel(config, autocast, Passes(per_pass, replicas, permute), low_precision_units)
    model.compression = compression
    return train_steps(
        config,
        model,
        start or ReferenceState(initial_values(config)),
        partial(read_all, read),
        lengths,
        steps=steps,
        dtype=dtype,
        nonfinite_steps=nonfinite_steps,
    )


class ReferenceModel:
    """The loss of the decoder over a global batch, and its gradient."""

    def __init__(
        self, config: RunConfig, autocast: torch.dtype | None, passes: Passes, low_precision_units: bool = False
    ) -> None:
        self.config, self.passes = config, passes
        self.decoder = ReferenceDecoder(config.model, autocast, config.precision.float8)
        self.unit_dtype = autocast if low_precision_units else None
        self.rounds_weights = rounds_weights(config)
        """whether the weights that a forward pass uses are the parameters rounded to bf16"""
        self.compression = Compression()

    def gradient(
        self, parameters: Parameters, batch: Batch, scale: float, _step: int = 0, /
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """(loss, gradient of every parameter, load of every router). The loss is the sum of the token losses divided by
        the number of valid tokens. The gradient also has the balance loss, whose mean over sequences is multiplied by
        `router_aux_loss`. `scale` is the loss scale, which the gradient no longer has.
        """
        valid = max(1, self.count_valid_targets(batch))
        gradients: dict[str, Tensor] = {}
        total, loads = 0.0, dict[str, Tensor]()
        for rank in torch.arange(len(batch[0])).chunk(self.compression.ranks):
            of_rank: dict[str, Tensor] = {}
            for samples in self.training_passes(len(rank)):
                chosen = rank[samples]
                part = tuple(entry[chosen] for entry in batch)
                loss, parts, pass_loads = self.differentiate(parameters, part, valid, len(batch[0]), scale)
                add_to(of_rank, parts)
                add_to(loads, pass_loads)
                total += loss
            low = self.compression.dtype
            add_to(gradients, of_rank if low is None else {name: part.to(low) for name, part in of_rank.items()})
        return total, {name: part.to(parameters[name].dtype) / scale for name, part in gradients.items()}, loads

    def differentiate(
        self, parameters: Parameters, part: Batch, valid: int, batch: int, scale: float
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """The share that some samples have in the loss of a batch with `valid` valid tokens, in its gradient and in
        the loads.
        """
        leaves = {n: p.detach().requires_grad_() for n, p in parameters.items() if not n.endswith("router.bias")}
        result = self.decoder.forward(self.as_used(parameters | leaves), *part)
        mean = result.token_losses.sum() / valid
        balance = self.config.model.router_aux_loss * result.balance.sum() / batch
        parts = torch.autograd.grad((mean + balance) * scale, list(leaves.values()), materialize_grads=True)
        return float(mean.detach()), dict(zip(leaves, parts, strict=True)), result.loads

    @torch.no_grad()
    def evaluate(self, parameters: Parameters, batch: Batch) -> tuple[float, int]:
        """(loss, number of valid tokens) of held-out samples."""
        used, total = self.as_used(parameters), 0.0
        for samples in self.evaluation_passes(len(batch[0])):
            part = (entry[samples] for entry in batch)
            total += float(self.decoder.forward(used, *part).token_losses.double().sum())
        valid = self.count_valid_targets(batch)
        return total / max(1, valid), valid

    def count_valid_targets(self, batch: Batch) -> int:
        return int((batch[1] != IGNORE_INDEX).sum())

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(INPUTS, batch, strict=False))

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
        """The parameters as a forward pass uses them: those of an equivalent model, and rounded to bf16 weights, or as
        FSDP2 does.
        """
        tie = self.config.model.tie
        if self.rounds_weights:
            parameters = {name: p if name.endswith("router.bias") else rounded(p) for name, p in parameters.items()}
        if self.passes.permute:
            parameters = equivalent_parameters(parameters, tie)
        low = self.decoder.low
        if self.rounds_weights and low is not None:
            return {name: p if name.endswith("router.bias") else p.to(low) for name, p in parameters.items()}
        if self.unit_dtype is None:
            return parameters
        kept = ("embedding.weight", "router.bias", *(["decoder.norm.weight"] if tie else []))
        return {name: p if name.endswith(kept) else p.to(self.unit_dtype) for name, p in parameters.items()}


def rounded(parameter: Tensor) -> Tensor:
    """The bf16 value of a parameter in its own dtype; a gradient passes unchanged."""
    return parameter + (parameter.to(torch.bfloat16).to(parameter.dtype) - parameter).detach()


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


def read_all(read: Read, ids: Sequence[int]) -> Batch:
    """The entries of some samples, each (samples, sequence)."""
    columns = zip(*(read(sample) for sample in ids), strict=True)
    return tuple(torch.from_numpy(np.stack(column).astype(np.int64)) for column in columns)
