"""Compares the loss of a batch with the losses of its parts, and finds out how the loss counts its targets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.core.data.batch_structure import CountRule
from meshwright.core.data.loader import count_targets
from meshwright.core.parallel.sync_batch_norm import GroupBatchNorm
from meshwright.core.trainer.first_batch.first_samples import FIRST_PART, SAMPLES, Flat, split_batch
from meshwright.core.trainer.first_batch.model_notes import BATCH_NORMS
from meshwright.core.trainer.first_batch.trained_tensors import check_leaves
from meshwright.core.trainer.objective import BatchLoss, Objective, count_error
from meshwright.errors import ConfigError

RANDOM_TOLERANCE = 0.3
"""The same for a forward that draws random numbers in evaluation mode too. A mean differs by a factor of about 2."""


@dataclass(frozen=True)
class Losses:
    """The loss of a batch and of its two parts."""

    whole: float
    parts: tuple[float, float]
    counts: tuple[int | None, ...]
    """valid targets of the batch and of its parts, if the loss returned them"""

    def error(self, weights: tuple[float, float] = (1.0, 1.0)) -> float:
        """Returns the relative difference of the whole and the weighted sum of the parts."""
        first, second = (weight * part for weight, part in zip(weights, self.parts, strict=True))
        return abs(self.whole - first - second) / max(abs(first) + abs(second), abs(self.whole), 1e-30)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds every generator, and restores torch's."""
    random.seed(seed)
    np.random.seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class BatchCheck:
    """Compares the loss of a batch with the losses of its parts. What it finds out is set in the objective."""

    def __init__(self, objective: Objective, batches: list[Flat], tolerance: float) -> None:
        self.objective, self.tolerance = objective, tolerance
        self.batches = split_batch(batches[0]) or batches  # the parts then have the same padding as the whole
        self.padded_alone = batches[1:]
        self.notes: list[str] = []

    def run(self, given: list[nn.Module]) -> list[str]:
        """Runs all checks and returns notes. The gradients of a training pass stay in the parameters. `given`: the
        modules that were copied.
        """
        objective, training = self.objective, [c for c in self.objective.modules() if c.training]
        with seeded(0):
            first = objective.compute(self.batches[0])
        self.notes += check_leaves(first, objective, given)
        objective.loss_names = tuple(first.parts) if isinstance(first.parts, dict) else ()
        objective.returns_count = first.count is not None
        objective.auxiliary_scale = 0.0
        if objective.has_auxiliary:
            self.notes.append(
                "the routers' auxiliary loss is a function of each micro-batch, weighted by its targets, so the result "
                "depends on how a batch is divided"
            )
        if math.isfinite(float(first.total.detach())):  # the first step reports a loss that is not finite
            self.check_without_dropout(training)
            self.check_training_mode()
        objective.auxiliary_scale = 1.0
        objective.zero_grad()
        first.total.backward()
        return self.notes

    def check_without_dropout(self, training: list[Any]) -> None:
        """Checks the loss in evaluation mode, or in training mode where the model has other outputs in evaluation."""
        self.objective.eval()
        try:
            self.loss_of(self.batches[0])
        except Exception:  # noqa: BLE001  such as a detector, which returns losses in training mode only
            self.restore(training)
        losses, is_random = self.losses()
        self.check_count(losses)
        if not is_random:
            self.check_shift()
            losses, _ = self.losses()  # the count of a mean may be another one now
        self.check_sum(losses, is_random)
        if not is_random:
            self.check_masked_mean()
            self.note_padding(losses)
        self.restore(training)

    def restore(self, training: list[Any]) -> None:
        for child in training:
            child.training = True

    @torch.no_grad()
    def loss_of(self, flat: Flat, seed: int = 0) -> BatchLoss:
        with seeded(seed):
            return self.objective.compute(flat)

    def losses(self) -> tuple[Losses, bool]:
        """Returns the losses of the batch and its parts, and whether the forward pass draws random numbers."""
        whole, *parts = (self.loss_of(flat) for flat in self.batches)
        counts = tuple(None if loss.count is None else int(loss.count) for loss in (whole, *parts))
        is_random = float(self.loss_of(self.batches[0], seed=1).total) != float(whole.total)
        return Losses(float(whole.total), (float(parts[0].total), float(parts[1].total)), counts), is_random

    def check_count(self, losses: Losses) -> None:
        """Finds the rule by which the loss counts its targets, if it returned a count."""
        structure = self.objective.batch
        rules = [structure.count] if structure.count is not None else []
        if losses.counts[0] is None:
            if not rules:
                raise ConfigError(
                    "the loss returned no count, and no entry of a sample is named labels, label, targets or target: "
                    f"{', '.join(structure.names)}",
                    "expected a loss that returns (sum, count), or an entry of that name",
                )
            return
        integers = [i for i, t in enumerate(self.batches[0]) if not t.is_floating_point()]
        rules += [
            CountRule(kind, i) for kind in ("valid", "shifted", "nonzero") for i in integers if self.fits(kind, i)
        ]
        rules.append(CountRule("samples", 0))
        for rule in rules:
            if all(count_targets(rule, flat) == n for flat, n in zip(self.batches, losses.counts, strict=True)):
                self.objective.batch = structure.with_count(rule)
                return
        expected = count_targets(structure.count, self.batches[0])
        raise count_error(losses.counts[0], expected or len(self.batches[0][0]))

    def fits(self, kind: str, entry: int) -> bool:
        return kind != "shifted" or self.batches[0][entry].ndim > 1

    def check_sum(self, losses: Losses, is_random: bool) -> None:
        """Raises ConfigError if the loss of the batch is not the sum of the losses of its parts."""
        tolerance = RANDOM_TOLERANCE if is_random else self.tolerance
        if losses.error() <= tolerance:
            return
        objective = self.objective
        if objective.loss is None:  # the model's own loss: a sum, or a mean that is multiplied by the count
            guessed = objective.reduction
            objective.reduction = "mean" if guessed == "sum" else "sum"
            if self.losses()[0].error() <= tolerance:
                return
            objective.reduction = guessed
        factor = sum(losses.parts) / losses.whole if losses.whole else math.inf
        found = (
            f"the loss of {SAMPLES} samples is {losses.whole:.6g}, and that of its parts of {FIRST_PART} and "
            f"{SAMPLES - FIRST_PART} samples adds up to {sum(losses.parts):.6g} (factor {factor:.4g})"
        )
        targets = [count_targets(objective.batch.count, flat) for flat in self.batches]
        by_target = (targets[1] / max(1, targets[0]), targets[2] / max(1, targets[0]))
        by_sample = (FIRST_PART / SAMPLES, 1 - FIRST_PART / SAMPLES)
        if objective.reduction == "mean" and objective.loss is not None:
            raise ConfigError(
                f"the loss is declared as a mean and is none: {found}",
                'try a loss that returns the sum, such as reduction="sum" in the loss, and train(...) without '
                "reduction: a mean with class weights has another divisor",
            )
        if losses.error(by_target) <= tolerance:
            raise ConfigError(
                f"the loss is a mean: {found}", 'try reduction="sum" in the loss, or train(..., reduction="mean")'
            )
        if losses.error(by_sample) <= tolerance:
            raise ConfigError(
                f"the loss is a mean over samples: {found}", "expected the sum over the valid targets of all samples"
            )
        raise ConfigError(
            f"the loss depends on which samples are in a batch: {found}",
            "expected the sum of a loss of each sample, so that it does not depend on the layout",
        )

    def check_shift(self) -> None:
        """Finds out whether model or loss compare position i with label i + 1, and refuses labels that are shifted in
        the data as well.
        """
        structure, whole = self.objective.batch, self.batches[0]
        if structure.count is None or structure.count.kind not in ("valid", "shifted"):
            return
        entry = structure.count.entry
        labels = whole[entry]
        tokens = [t for i, t in enumerate(whole) if i != entry and t.shape == labels.shape and t.dtype == labels.dtype]
        if labels.ndim != 2 or labels.is_floating_point() or not tokens or labels.shape[1] < 3:
            return
        if self.ignores_first_label(entry):
            self.objective.batch = structure.with_count(replace(structure.count, kind="shifted"))
        shifts = self.objective.batch.count != structure.count or structure.count.kind == "shifted"
        for inputs in tokens:
            if shifts and self.equal_labels(labels[:, :-1], inputs[:, 1:]) and not self.equal_labels(labels, inputs):
                raise ConfigError(
                    "labels are shifted twice: label i of a sample is token i + 1, and position i is compared with "
                    "label i + 1",
                    "try labels that equal the tokens, or a loss that does not shift",
                )
            if not shifts and self.equal_labels(labels, inputs):
                self.notes.append(
                    "every label equals the token at its own position, and nothing shifts the labels: the model learns "
                    "to copy its input"
                )

    def ignores_first_label(self, entry: int) -> bool:
        """Whether the loss is the same without the first label of every sample, and another without the second."""
        whole = self.batches[0]
        if not bool((whole[entry][:, 0] != self.ignored).any()):
            return False
        self.objective.checked = True
        try:
            complete, without_first, without_second = (
                self.returned_loss(self.with_labels_masked(whole, (slice(None), *position)))
                for position in ((slice(0),), (0,), (1,))
            )
        except Exception:  # noqa: BLE001  a loss without ignored labels may raise anything
            return False
        rounding = 1e-3 * self.tolerance * abs(complete)
        return abs(without_first - complete) <= rounding < abs(without_second - complete)

    @property
    def ignored(self) -> int:
        """The value of labels that are ignored."""
        assert self.objective.batch.count is not None
        return self.objective.batch.count.ignored

    def with_labels_masked(self, flat: Flat, index: Any) -> Flat:
        """Returns a batch whose labels at an index are ignored."""
        assert self.objective.batch.count is not None
        entry = self.objective.batch.count.entry % len(flat)
        labels = flat[entry].clone()
        labels[index] = self.ignored
        return (*flat[:entry], labels, *flat[entry + 1 :])

    def returned_loss(self, flat: Flat) -> float:
        """Returns the loss as model or loss returned it: a mean is not multiplied by the count."""
        loss = self.loss_of(flat)
        if self.objective.reduction != "mean":
            return float(loss.total)
        return float(loss.total) / max(1, int(self.objective.count_targets(flat) if loss.count is None else loss.count))

    def check_masked_mean(self) -> None:
        """Raises ConfigError if a mean is that of the samples' means: it equals the mean over targets where all samples
        have as many, so labels of the first sample are masked.
        """
        rule, parts = self.objective.batch.count, split_batch(self.batches[0])
        if self.objective.reduction != "mean" or rule is None or rule.kind not in ("valid", "shifted") or not parts:
            return
        labels = parts[0][rule.entry]
        if labels.ndim < 2 or labels.is_floating_point():
            return
        even, odd = (0, ..., slice(0, None, 2)), (0, ..., slice(1, None, 2))
        sample = tuple(t[:1] for t in parts[0])
        self.objective.checked = True
        try:
            of_sample, *halves = (
                float(self.loss_of(flat).total)
                for flat in (sample, self.with_labels_masked(sample, even), self.with_labels_masked(sample, odd))
            )
        except Exception:  # noqa: BLE001  a loss without ignored labels may raise anything
            return
        if Losses(of_sample, (halves[0], halves[1]), ()).error() > self.tolerance:
            return  # the loss does not ignore such labels
        masked = [self.with_labels_masked(flat, even) for flat in parts[:2]]
        whole, *of_parts = (float(self.loss_of(flat).total) for flat in (*masked, parts[2]))
        if Losses(whole, (of_parts[0], of_parts[1]), ()).error() > self.tolerance:
            raise ConfigError(
                "the loss is the mean of the means of its samples: with labels of one sample masked, that of "
                f"{SAMPLES} samples is {whole:.6g}, and that of its parts adds up to {sum(of_parts):.6g}",
                "expected the mean, or the sum, over the valid targets of all samples",
            )

    def note_padding(self, losses: Losses) -> None:
        """Notes that a sample has another loss if its batch is padded to another length."""
        if self.padded_alone[0] is self.batches[1]:
            return
        alone = tuple(float(self.loss_of(flat).total) for flat in self.padded_alone)
        if replace(losses, parts=(alone[0], alone[1])).error() > self.tolerance:
            self.notes.append(
                "the loss of a sample depends on the padding of its batch, so the result depends on the layout; try to "
                "mask the padding in the model"
            )

    def check_training_mode(self) -> None:
        """Notes a forward pass that depends on the other samples of a batch in training mode only; `model_notes` names
        batch normalization.
        """
        if any(isinstance(child, (*BATCH_NORMS, GroupBatchNorm)) for child in self.objective.modules()):
            return
        losses, is_random = self.losses()
        if not is_random and losses.error() > self.tolerance:
            self.notes.append(
                "in training mode the loss of a sample depends on the other samples of its micro-batch (relative "
                f"difference {losses.error():.1e}), so the result depends on the layout"
            )

    def equal_labels(self, labels: Tensor, tokens: Tensor) -> bool:
        """Whether every valid label equals the token at its position."""
        valid = labels != self.ignored
        return bool(valid.any()) and bool((labels == tokens)[valid].all())
