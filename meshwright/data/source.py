"""What a source of samples is: something with a length, an item for every index, and a content fingerprint."""

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
"""What one index gives: the model's inputs, the targets last. For the decoder: (tokens, labels)."""


class Source(Protocol):
    """Random access to samples. `__getitem__` must depend on the index alone."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def fingerprint(self) -> str: ...

    def masked_sample(self) -> Sample:
        """A sample of the right shape whose targets all count for nothing."""
        ...


class ConcatenatedSource:
    """Several sources in one line of ids, as the stream numbers them. The pieces are never copied."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise DataError("no source was found", "give at least one")
        self.sources = list(sources)
        self.name = ", ".join(source.name for source in sources)
        self.starts = [0]
        for source in sources:
            self.starts.append(self.starts[-1] + len(source))

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[Source, int]:
        which = bisect_right(self.starts, index) - 1
        return self.sources[which], index - self.starts[which]

    def __getitem__(self, index: int) -> Sample:
        source, within = self.locate(index)
        return source[within]

    def fingerprint(self) -> str:
        return content_digest(*(source.fingerprint() for source in self.sources))

    def masked_sample(self) -> Sample:
        return self.sources[0].masked_sample()


class SyntheticSource:
    """Token samples hashed from their index: any number of them, no file, no memory."""

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
    """Any object with a length and an item for every index, as a source: a list, a dataset, a class of the user's.

    An item is an array, a tuple of arrays or numbers (targets last), or a dict of them (targets under its last key).
    A one-dimensional integer item alone is a sequence of tokens: inputs and shifted labels are cut from it.
    """

    def __init__(self, items: Any, name: str = "") -> None:
        self.items = items
        self.name = name or type(items).__name__
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
            raise DataError(
                f"source {self.name} has no length or no items", "give an object with __len__ and __getitem__"
            )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        item = self.items[index]
        if isinstance(item, dict):
            item = tuple(item.values())
        if isinstance(item, (tuple, list)) and not all(np.isscalar(part) for part in item):
            return tuple(np.asarray(part) for part in item)
        alone = np.asarray(item)
        if alone.ndim != 1 or alone.dtype.kind not in "iu" or alone.size < 2:
            raise ValueError(
                f"an item is neither inputs with targets nor a sequence of tokens: shape {alone.shape}, {alone.dtype}"
            )
        alone = alone.astype(np.int64)
        return alone[:-1], alone[1:]

    def fingerprint(self) -> str:
        """The object's own `fingerprint` if it has one, else a digest of its length and of up to 64 of its samples."""
        own = getattr(self.items, "fingerprint", None)
        if own is not None:
            return str(own() if callable(own) else own)
        pieces: list[Any] = [len(self)]
        for index in np.unique(np.linspace(0, len(self) - 1, 64).astype(np.int64)):
            try:
                pieces.extend(array.tobytes() for array in self[int(index)])
            except Exception as error:  # noqa: BLE001  a sample that cannot be decoded is the loader's to name, in its turn
                pieces.append(type(error).__name__)
        return content_digest(*pieces)

    def masked_sample(self) -> Sample:
        for index in range(min(len(self), 1000)):
            try:
                sample = self[index]
            except Exception:  # noqa: BLE001  only the shape is wanted, from whichever sample has one
                continue
            *inputs, targets = sample
            if targets.dtype.kind != "i":
                raise DataError(
                    f"source {self.name} cannot quarantine: no {targets.dtype} target counts for nothing",
                    'use integer targets, or data.on_bad_sample = "stop"',
                )
            return (*(np.zeros_like(array) for array in inputs), np.full_like(targets, IGNORE_INDEX))
        raise DataError(f"source {self.name} has no decodable sample among its first 1000", "check the source")


def masked_tokens(sequence: int) -> Sample:
    return np.zeros(sequence, np.int64), np.full(sequence, IGNORE_INDEX, np.int64)


def content_digest(*pieces: Any) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        raw = piece if isinstance(piece, bytes) else str(piece).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]
