"""The samples on which a custom model is checked: how many, cut to what length, and when a model is too large."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.data.loader import MicroBatchDataset, count_targets
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import DataError

SAMPLES, FIRST_PART = 5, 2
"""Samples of the checked batch, and of the first of its two parts; the parts have different sizes, so that a mean over
samples differs from a mean over targets."""
PASSES = 16
"""Forward passes over the batch that the check takes, a backward pass counted as two."""
MAX_PARAMETERS = 1 << 29
"""Parameters of the largest model that is checked: the copy has 8 bytes for each."""
MAX_FLOPS = 1e13
"""FLOPs of the largest check, at 2 per parameter, target and pass: some minutes on a CPU core."""
SHORTENED_FLOPS = 3e11
"""FLOPs above which the sequences of the samples are cut: some ten seconds on a CPU core."""
MIN_SEQUENCE = 8
"""Tokens of the shortest sequence that is cut from a sample, and a divisor of those of longer ones."""

Flat = tuple[Tensor, ...]


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


def split_batch(whole: Flat) -> list[Flat] | None:
    """Returns a batch and its two parts, with the same padding; None if an entry is not one row per sample."""
    if not all(t.ndim and len(t) == SAMPLES for t in whole):
        return None
    return [whole, tuple(t[:FIRST_PART] for t in whole), tuple(t[FIRST_PART:] for t in whole)]


def shorten(custom: CustomModel, batches: list[Flat]) -> list[Flat]:
    """Cuts sequences of tokens where the check would take long: to the positions with the most valid labels."""
    rule, whole = custom.batch.count, batches[0]
    if rule is None or find_unit(custom.batch, whole) != "tokens":
        return batches
    labels = whole[rule.entry]
    length = labels.shape[1]
    kept = max(MIN_SEQUENCE, int(SHORTENED_FLOPS / (PASSES * 2 * parameter_count(custom) * SAMPLES)))
    kept -= kept % MIN_SEQUENCE
    if kept >= length:
        return batches
    valid = torch.nn.functional.pad((labels != rule.ignored).sum(0).cumsum(0), (1, 0))
    start = int((valid[kept:] - valid[:-kept]).argmax())
    return split_batch(tuple(cut(t, length, start, kept) for t in whole)) or batches


def cut(tensor: Tensor, length: int, start: int, kept: int) -> Tensor:
    """Cuts every dimension of the sequence's length, but not the first, which is that of samples."""
    for dim in range(1, tensor.ndim):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, start, kept)
    return tensor


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


def parameter_count(custom: CustomModel) -> int:
    return sum(p.numel() for module in custom.modules() for p in module.parameters())


def why_unchecked(custom: CustomModel, flat: Flat) -> str:
    """Returns why the model cannot be run on the first batch, or an empty text."""
    size, targets = parameter_count(custom), max(SAMPLES, count_targets(custom.batch.count, flat))
    if size > MAX_PARAMETERS or PASSES * 2 * size * targets > MAX_FLOPS:
        return f"{PASSES} passes of {size:,} parameters over {targets:,} targets would take long on a CPU"
    return ""
