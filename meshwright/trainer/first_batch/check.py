"""Checks a custom model on the first samples, before a step: the loss of a batch must be the sum over its samples.

The check runs on a plain copy of the model in one process. What makes the result depend on the layout is refused or,
where a run is still well-defined, named in a note of the start record.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.config import IGNORE_INDEX
from meshwright.data.batch_structure import BatchStructure, CountRule
from meshwright.data.loader import MicroBatchDataset, count_targets
from meshwright.data.source import ConcatenatedSource, Source
from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.parallel.sync_batch_norm import GroupBatchNorm
from meshwright.trainer.custom_model import CustomModel
from meshwright.trainer.first_batch.model_notes import BATCH_NORMS, gradient_notes, model_notes, unused_parameters
from meshwright.trainer.objective import BatchLoss, Objective, Reduction, count_error

SAMPLES, FIRST_PART = 5, 2
"""Samples of the checked batch, and of the first of its two parts; the parts have different sizes, so that a mean over
samples differs from a mean over targets."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference of a loss and the sum over its parts, by the dtype of the copy. A model may compute in
float32 inside of a float64 copy."""
RANDOM_TOLERANCE = 0.3
"""The same for a forward that draws random numbers in evaluation mode too. A mean differs by a factor of about 2."""
MAX_PARAMETERS = 1 << 29
"""Parameters of the largest model that is checked: the copy has 8 bytes for each."""
MAX_FLOPS = 1e12
"""Largest forward pass that is checked, at 2 FLOPs per parameter and target: some ten seconds on a CPU core."""

Flat = tuple[Tensor, ...]


@dataclass(frozen=True)
class FirstBatch:
    """What the check found out about a custom model."""

    count: CountRule | None
    """how valid targets are counted"""
    unit: str
    notes: tuple[str, ...]
    reduction: Reduction | None = None
    loss_names: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """parameters that require a gradient and got none"""
    returns_count: bool = False
    """whether the loss returns the number of its targets"""

    def apply(self, custom: CustomModel) -> CustomModel:
        """Returns the custom model as it is trained."""
        return replace(
            custom,
            batch=replace(custom.batch, count=self.count),
            unit=self.unit,
            notes=self.notes,
            reduction=self.reduction or custom.reduction,
            loss_names=self.loss_names,
            returns_count=self.returns_count,
        )


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


def check_first_batch(custom: CustomModel, source: Source, seed: int = 0) -> FirstBatch:
    """Finds out how the loss of a custom model counts its targets. Raises ConfigError if the loss of a batch is not the
    sum over its samples. `custom.batch` is the structure of the source's samples. A model on the meta device gets its
    initial values by `seed`.
    """
    batches = read_batches(custom, source)
    if reason := why_unchecked(custom, batches[0]):
        unchecked = (*model_notes(custom.module, custom.spec), f"the first batch is not checked: {reason}")
        return FirstBatch(custom.batch.count, find_unit(custom.batch, batches[0]), unchecked)
    custom = custom.with_values(seed)
    notes = model_notes(custom.module, custom.spec)
    objective, tolerance = build_copy(custom, batches[0])
    notes += BatchCheck(objective, batches, tolerance).run()
    notes += gradient_notes(objective.model, custom.spec)
    return FirstBatch(
        objective.batch.count,
        find_unit(objective.batch, batches[0]),
        tuple(notes),
        objective.reduction,
        objective.loss_names,
        tuple(unused_parameters(objective.model)),
        objective.returns_count,
    )


def read_batches(custom: CustomModel, source: Source) -> list[Flat]:
    """Returns a batch of the first samples that can be decoded, and its two parts."""
    dataset = MicroBatchDataset(ConcatenatedSource([source]), False, custom.batch, custom.collate)
    indices = range(min(len(source), 4 * SAMPLES))
    tried = {i: dataset[np.array([i], np.uint64)].bad_samples for i in indices}
    good = [i for i, bad in tried.items() if not bad][:SAMPLES]
    if not good:
        raise DataError(f"{tried[0][0]}, and so are the next {len(tried) - 1}", "try to repair the samples")
    ids = np.array([good[i % len(good)] for i in range(SAMPLES)], np.uint64)
    return [dataset[part].tensors for part in (ids, ids[:FIRST_PART], ids[FIRST_PART:])]


def find_unit(batch: BatchStructure, flat: Flat) -> str:
    """Returns what a target is called: a token where it labels a position of a sequence of integers, a sample where
    every sample has one.
    """
    if batch.count is None:
        return "targets"
    target = flat[batch.count.entry]
    inputs = [t for i, t in enumerate(flat) if i not in batch.targets and not t.is_floating_point()]
    if target.ndim == 2 and any(t.shape == target.shape for t in inputs):
        return "tokens"
    one_each = target.is_floating_point() or target.numel() == len(target) or batch.count.kind == "samples"
    return "samples" if one_each else "targets"


def why_unchecked(custom: CustomModel, flat: Flat) -> str:
    """Returns why the model cannot be run on the first batch, or an empty text."""
    size = sum(p.numel() for module in custom.modules() for p in module.parameters())
    targets = max(SAMPLES, count_targets(custom.batch.count, flat))
    if size > MAX_PARAMETERS or 2 * size * targets > MAX_FLOPS:
        return f"a pass of {size:,} parameters over {targets:,} targets would take long on a CPU"
    return ""


def build_copy(custom: CustomModel, flat: Flat) -> tuple[Objective, float]:
    """Returns a copy of model and loss in float64, or in float32 where float64 fails, and the tolerance."""
    failure: Exception | None = None
    for dtype, tolerance in TOLERANCES.items():
        objective = custom.build_objective(torch.device("cpu"), dtype)
        try:
            with seeded(0):
                objective.compute(flat)
        except MeshwrightError:
            raise
        except Exception as error:  # noqa: BLE001  a user's model may raise anything
            failure = error
            continue
        objective.checked = False
        return objective, tolerance
    assert failure is not None
    raise failure  # it is reported as a failure of a rank, with the line and the traceback of the user's code


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
        self.batches = batches
        whole = batches[0]
        if all(t.ndim and len(t) == SAMPLES for t in whole):  # the parts then have the same padding as the whole
            self.batches = [whole, tuple(t[:FIRST_PART] for t in whole), tuple(t[FIRST_PART:] for t in whole)]
        self.padded_alone = batches[1:]
        self.notes: list[str] = []

    def run(self) -> list[str]:
        """Runs all checks and returns notes. The gradients of a training pass stay in the parameters."""
        objective, training = self.objective, [c for c in self.objective.modules() if c.training]
        with seeded(0):
            first = objective.compute(self.batches[0])
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
        self.check_sum(losses, is_random)
        if not is_random:
            self.check_shift()
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
            raise ConfigError(f"the loss is declared as a mean and is none: {found}", 'try without reduction="mean"')
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
            self.objective.batch = structure.with_count(CountRule("shifted", entry))
        shifts = self.objective.batch.count == CountRule("shifted", entry)
        for inputs in tokens:
            if shifts and equal_labels(labels[:, :-1], inputs[:, 1:]) and not equal_labels(labels, inputs):
                raise ConfigError(
                    "labels are shifted twice: label i of a sample is token i + 1, and position i is compared with "
                    "label i + 1",
                    "try labels that equal the tokens, or a loss that does not shift",
                )
            if not shifts and equal_labels(labels, inputs):
                self.notes.append(
                    "every label equals the token at its own position, and nothing shifts the labels: the model learns "
                    "to copy its input"
                )

    def ignores_first_label(self, entry: int) -> bool:
        """Whether the loss is the same without the first label of every sample, and another without the second."""
        whole = self.batches[0]
        if not bool((whole[entry][:, 0] != IGNORE_INDEX).any()):
            return False
        self.objective.checked = True

        def loss_without(position: int) -> float:
            labels = whole[entry].clone()
            labels[:, position] = IGNORE_INDEX
            flat = tuple(labels if i == entry else t for i, t in enumerate(whole))
            return float(self.loss_of(flat).total)

        reduction = self.objective.reduction
        complete = float(self.loss_of(whole).total)
        try:
            if reduction == "mean":  # the count would change with the labels
                return False
            return loss_without(0) == complete and loss_without(1) != complete
        except Exception:  # noqa: BLE001  a loss without ignored labels may raise anything
            return False

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


def equal_labels(labels: Tensor, tokens: Tensor) -> bool:
    """Whether every valid label equals the token at its position."""
    valid = labels != IGNORE_INDEX
    return bool(valid.any()) and bool((labels == tokens)[valid].all())
