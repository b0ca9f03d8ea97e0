"""The `Source` protocol (a length, a sample per index, a content fingerprint) and the sources that read no files."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.batch_structure import BatchStructure, is_dataclass_value
from meshwright.errors import DataError, describe_exception

Sample = Any
"""The value at one index: a tuple of arrays (inputs, then the target), a dict or a dataclass of arrays. For the
built-in models: (tokens, labels), or (tokens, labels, documents) with the index of every token's document.
"""

Collate = Callable[[list[Any]], Any]
"""A user's function from a list of samples to a batch."""

FINGERPRINT_SAMPLES = 64
"""Samples of a user's dataset that its fingerprint covers."""

REPEATED_SAMPLES = 8
"""Samples that are read twice before the first step."""

FIRST_SAMPLE_SEARCH = 1000
"""Samples that `first_sample` tries to decode before it gives up."""


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


def is_packed(source: Source) -> bool:
    """Whether the samples of a source for built-in models are (tokens, labels, documents)."""
    return bool(getattr(source, "packed", False))


class ConcatenatedSource:
    """Several sources as one: sample ids continue from one source to the next, as the stream numbers them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise DataError("the data configuration has no source", "try at least one entry in data.mixture")
        self.sources = list(sources)
        self.name = ", ".join(source.name for source in sources)
        self.packed = any(is_packed(source) for source in sources)
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

    An item is a tuple of arrays or numbers (the target last), a dict or dataclass of them, or one one-dimensional
    array or list of integers: a token sequence, which is split into inputs and shifted labels. What a collate function
    takes is left as it is.
    """

    def __init__(self, dataset: Any, name: str = "", collate: Collate | None = None) -> None:
        self.dataset, self.collate = dataset, collate
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
        if self.collate is not None or isinstance(item, Mapping) or is_dataclass_value(item):
            return item
        if isinstance(item, tuple) or (isinstance(item, list) and not all(np.isscalar(value) for value in item)):
            return tuple(item)
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
                content.extend(sample_content(self[index], self.collate))
            except Exception as error:  # noqa: BLE001  the loader reports a bad sample when the stream reaches it
                content.append(type(error).__name__)
        return content_digest(*content)

    def masked_sample(self) -> Sample:
        sample = first_sample(self)
        return masked_batch(sample, BatchStructure.of(sample), self.name)


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


def first_sample(source: Source) -> Sample:
    """Returns the first sample that can be decoded."""
    reasons = []
    for index in range(min(len(source), FIRST_SAMPLE_SEARCH)):
        try:
            return source[index]
        except Exception as error:  # noqa: BLE001  any sample that decodes has the structure and the shapes
            reasons.append(f"{type(error).__name__}: {describe_exception(error)}")
    if not reasons:
        raise DataError(f"source {source.name} is empty", "expected at least one sample")
    raise DataError(
        f"source {source.name}: the first {len(reasons)} sample(s) cannot be decoded: {reasons[0]}",
        "try to read the dataset outside of Meshwright",
    )


def find_structure(source: Source, collate: Collate | None = None) -> BatchStructure:
    """Returns the structure of the samples of a source, or of the batches that a collate function makes of them."""
    sample = first_sample(source)
    return BatchStructure.of(sample if collate is None else collate_samples(collate, [sample], source.name))


def collate_samples(collate: Collate, samples: list[Any], where: str) -> Any:
    """Returns the batch that a user's collate function makes of samples; a list is taken as a tuple."""
    try:
        batch = collate(samples)
    except Exception as error:
        raise DataError(
            f"collate failed on {where}: {type(error).__name__}: {describe_exception(error)}",
            "try collate([dataset[0], dataset[1]]) outside of Meshwright",
        ) from error
    return tuple(batch) if isinstance(batch, list) else batch


def sample_content(sample: Sample, collate: Collate | None = None) -> list[Any]:
    """Returns names, dtypes, shapes and bytes of a sample's entries, or of those of a batch of this sample alone."""
    if collate is not None:
        sample = collate_samples(collate, [sample], "one sample")
    structure = BatchStructure.of(sample)
    arrays = [np.asarray(value) for value in structure.flatten(sample)]
    named = [] if structure.is_tuple else list(structure.names)
    return named + [part for a in arrays for part in (str(a.shape), str(a.dtype), a.tobytes())]


def raise_if_not_repeatable(source: Source, collate: Collate | None = None) -> None:
    """Raises DataError if a sample differs between two reads, or a batch between two calls of the collate function. The
    loader reports a sample that cannot be decoded.
    """
    for index in spaced_indices(len(source), REPEATED_SAMPLES):
        try:
            first, second = (sample_content(source[index], collate) for _ in range(2))
        except Exception:  # noqa: BLE001  a user's source may raise anything
            continue
        if first != second:
            what = "the sample" if collate is None else "the sample, or two calls of collate,"
            raise DataError(
                f"source {source.name}, index {index}: two reads of {what} differ, so a run could not be repeated",
                "try to make the sample depend on the index alone, for example seed an augmentation with the index",
            )


def masked_batch(sample: Sample, structure: BatchStructure, name: str) -> Sample:
    """Returns a sample or batch with the same inputs whose targets are all ignored."""
    ignored = IGNORE_INDEX if structure.count is None else structure.count.ignored
    flat = [np.asarray(value) for value in structure.flatten(sample)]
    if not structure.targets:
        raise DataError(
            f"source {name} cannot quarantine a sample: no entry is named labels, label, targets or target",
            'try to name the targets, or data.on_bad_sample = "stop"',
        )
    for target in structure.targets:
        if flat[target].dtype.kind != "i":
            raise DataError(
                f"source {name} cannot quarantine a sample: targets of dtype {flat[target].dtype} cannot be masked",
                'try integer targets, or data.on_bad_sample = "stop"',
            )
        flat[target] = np.full_like(flat[target], ignored)
    return structure.unflatten(flat)


def masked_tokens(sequence: int) -> Sample:
    return np.zeros(sequence, np.int64), np.full(sequence, IGNORE_INDEX, np.int64)


def content_digest(*values: Any) -> str:
    """The first 32 hex digits of the SHA-256 of a list of values, each prefixed by its length."""
    digest = hashlib.sha256()
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]
