"""The `Source` protocol (a length, a sample per index, a content fingerprint) and the sources that read no files."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.config import IGNORE_INDEX
from meshwright.errors import DataError

Sample = tuple[NDArray[Any], ...]
"""The value at one index: the inputs of the model, then the targets. For a language model: (tokens, labels)."""

FINGERPRINT_SAMPLES = 64
"""Samples of a user's dataset that its fingerprint covers."""

REPEATED_SAMPLES = 8
"""Samples that are read twice before the first step."""

MASKED_SAMPLE_SEARCH = 1000
"""Samples that `IndexableSource.masked_sample` tries to decode before it gives up."""


class Source(Protocol):
    """Random access to samples. The result of `__getitem__` must depend on the index alone."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def fingerprint(self) -> str:
        """A digest of the content, independent of its path. It is part of the identity of a run."""
        ...

    def masked_sample(self) -> Sample:
        """A sample of the same shapes whose targets are all IGNORE_INDEX: it replaces a quarantined sample."""
        ...


class ConcatenatedSource:
    """Several sources as one: sample ids continue from one source to the next, as the stream numbers them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise DataError("the data configuration has no source", "try at least one entry in data.mixture")
        self.sources = list(sources)
        self.name = ", ".join(source.name for source in sources)
        self.starts = [0]
        for source in sources:
            self.starts.append(self.starts[-1] + len(source))

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[Source, int]:
        """(source, index within that source) of a sample id."""
        number = bisect_right(self.starts, index) - 1
        return self.sources[number], index - self.starts[number]

    def __getitem__(self, index: int) -> Sample:
        source, source_index = self.locate(index)
        return source[source_index]

    def fingerprint(self) -> str:
        return content_digest(*(source.fingerprint() for source in self.sources))

    def masked_sample(self) -> Sample:
        return self.sources[0].masked_sample()


class SyntheticSource:
    """Random token samples seeded by their index: any number of them, without files or memory."""

    def __init__(self, samples: int, sequence: int, vocab: int) -> None:
        self.name = f"synthetic({samples})"
        self.samples, self.sequence, self.vocab = samples, sequence, vocab

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.Generator(np.random.Philox(key=index)).integers(0, self.vocab, self.sequence + 1)
        return tokens[:-1], tokens[1:]

    def fingerprint(self) -> str:
        return content_digest("synthetic", self.samples, self.sequence, self.vocab)

    def masked_sample(self) -> Sample:
        return masked_tokens(self.sequence)


class IndexableSource:
    """A map-style dataset as a source: any object with `__len__` and `__getitem__`, such as a list or a torch Dataset.

    An item is a tuple of arrays or numbers (targets last), a dict of them (targets under its last key), or one
    one-dimensional integer array: a token sequence, which is split into inputs and shifted labels.
    """

    def __init__(self, dataset: Any, name: str = "") -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"source {self.name} is not a map-style dataset: it lacks __len__ or __getitem__",
                "expected an object with __len__ and __getitem__",
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        item = self.dataset[index]
        if isinstance(item, dict):
            item = tuple(item.values())
        if isinstance(item, (tuple, list)) and not all(np.isscalar(value) for value in item):
            return tuple(np.asarray(value) for value in item)
        tokens = np.asarray(item)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < 2:
            raise ValueError(
                "expected (inputs, targets) or a one-dimensional integer sequence, "
                f"found an item of shape {tokens.shape} and dtype {tokens.dtype}"
            )
        tokens = tokens.astype(np.int64)
        return tokens[:-1], tokens[1:]

    def fingerprint(self) -> str:
        """The `fingerprint` of the dataset if it defines one, else a digest of its length and of up to 64 samples."""
        defined = getattr(self.dataset, "fingerprint", None)
        if defined is not None:
            return str(defined() if callable(defined) else defined)
        content: list[Any] = [len(self)]
        for index in spaced_indices(len(self), FINGERPRINT_SAMPLES):
            try:
                content.extend(array.tobytes() for array in self[index])
            except Exception as error:  # noqa: BLE001  the loader reports a bad sample when the stream reaches it
                content.append(type(error).__name__)
        return content_digest(*content)

    def masked_sample(self) -> Sample:
        for index in range(min(len(self), MASKED_SAMPLE_SEARCH)):
            try:
                sample = self[index]
            except Exception:  # noqa: BLE001  any sample that decodes gives the shapes
                continue
            *inputs, targets = sample
            if targets.dtype.kind != "i":
                raise DataError(
                    f"source {self.name} cannot quarantine a sample: targets of dtype {targets.dtype} cannot be masked",
                    'try integer targets, or data.on_bad_sample = "stop"',
                )
            return (*(np.zeros_like(array) for array in inputs), np.full_like(targets, IGNORE_INDEX))
        raise DataError(
            f"source {self.name}: none of the first {MASKED_SAMPLE_SEARCH} samples can be decoded",
            "try to read the dataset outside of Meshwright",
        )


class FingerprintedSource:
    """A source whose fingerprint was computed before, in another process."""

    def __init__(self, source: Source, fingerprint: str) -> None:
        self.source, self.name, self.known_fingerprint = source, source.name, fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.source[index]

    def fingerprint(self) -> str:
        return self.known_fingerprint

    def masked_sample(self) -> Sample:
        return self.source.masked_sample()


def spaced_indices(length: int, count: int) -> list[int]:
    """At most `count` evenly spaced indices, the first and the last included."""
    return [int(index) for index in np.unique(np.linspace(0, length - 1, count).astype(np.int64))] if length else []


def raise_if_not_repeatable(source: Source) -> None:
    """Raises DataError if a sample differs between two reads. The loader reports a sample that cannot be decoded."""
    for index in spaced_indices(len(source), REPEATED_SAMPLES):
        try:
            first, second = ([(a.shape, a.dtype, a.tobytes()) for a in source[index]] for _ in range(2))
        except Exception:  # noqa: BLE001  a user's source may raise anything
            continue
        if first != second:
            raise DataError(
                f"source {source.name}, index {index}: two reads of the sample differ, so a run could not be repeated",
                "try to make the sample depend on the index alone, for example seed an augmentation with the index",
            )


def masked_tokens(sequence: int) -> Sample:
    return np.zeros(sequence, np.int64), np.full(sequence, IGNORE_INDEX, np.int64)


def content_digest(*values: Any) -> str:
    """The first 32 hex digits of the SHA-256 of a list of values, each prefixed by its length."""
    digest = hashlib.sha256()
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]
