"""The beginning of the text of each sample of a step; where there is none, its tokens or the range of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.data.sample_text import read_texts
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.trainer.job import Job
from meshwright.errors import MeshwrightError

MAX_TEXTS = 256
"""Samples of a step that are decoded."""
MAX_CHARACTERS = 400
"""Characters of a text that are kept."""
SHOWN_TOKENS = 24
DOCUMENT_SEPARATOR = " | "


def sample_texts(run: Path, job: Job, samples: Sequence[int], tokenizer: str) -> dict[int, str]:
    """Sample id -> the beginning of its text, for the first MAX_TEXTS samples."""
    samples = list(samples)[:MAX_TEXTS]
    if job.custom is None:
        try:
            texts = read_texts(run, samples, tokenizer)
        except MeshwrightError:  # synthetic data, and token files without a tokenizer, have no text
            return {sample: token_text(job, sample) for sample in samples}
        return {text["sample"]: DOCUMENT_SEPARATOR.join(text["documents"])[:MAX_CHARACTERS] for text in texts}
    return {sample: array_text(job, sample) for sample in samples}


def array_text(job: Job, sample: int) -> str:
    """Shape and range of every entry of a sample for a custom model; empty if it cannot be decoded."""
    try:
        value = ConcatenatedSource(job.sources)[sample]
        structure = BatchStructure.of(value)
        entries = zip(structure.names, map(np.asarray, structure.flatten(value)), strict=True)
        return "; ".join(f"entry {name}: {array_range(entry)}" for name, entry in entries)[:MAX_CHARACTERS]
    except Exception:  # noqa: BLE001  a source may raise anything for a sample that it cannot decode
        return ""


def array_range(array: np.ndarray[Any, Any]) -> str:
    """The value of a number; the shape of an array, with its smallest and largest value."""
    if array.size == 1:
        return f"{array.item():.4g}"
    return f"shape {' x '.join(map(str, array.shape))}, from {array.min():.4g} to {array.max():.4g}"


def token_text(job: Job, sample: int) -> str:
    """The first token ids of a sample; empty if it cannot be decoded."""
    try:
        tokens = np.asarray(ConcatenatedSource(job.sources)[sample][0]).reshape(-1)
    except Exception:  # noqa: BLE001  a source may raise anything for a sample that it cannot decode
        return ""
    more = " ..." if len(tokens) > SHOWN_TOKENS else ""
    return f"tokens {' '.join(map(str, tokens[:SHOWN_TOKENS].tolist()))}{more}"
