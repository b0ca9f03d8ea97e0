"""The user's data with the small vocabulary of a proof run. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import Sample, Source, content_digest

MEAN_DOCUMENT_TOKENS = 6


def open_proof_sources(config: RunConfig, proof: RunConfig, masked_labels: bool = False) -> list[Source]:
    """The sources of the user's config with the sequence length and the vocabulary of a proof run."""
    opened = open_sources(proof.data, config.model.vocab, config.model.separator)
    model = proof.model
    if masked_labels:
        return [MaskedSource(source, model.vocab, model.separator) for source in opened]
    return [ModuloSource(source, model.vocab) for source in opened]


class ModuloSource:
    """A source whose token ids are taken modulo a small vocabulary."""

    def __init__(self, source: Source, vocab: int) -> None:
        self.source, self.vocab = source, vocab
        self.name = f"{source.name} modulo {vocab}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self.source[index]
        return tokens % self.vocab, np.where(labels == IGNORE_INDEX, IGNORE_INDEX, labels % self.vocab)

    def fingerprint(self) -> str:
        return content_digest(type(self).__name__, self.vocab, self.source.fingerprint())

    def masked_sample(self) -> Sample:
        return self.source.masked_sample()


class MaskedSource(ModuloSource):
    """The labels of each sample are masked after a random length, so that ranks and micro-batches have unequal numbers
    of valid tokens, and separators divide the sample into short documents. Both depend on the index alone.
    """

    def __init__(self, source: Source, vocab: int, separator: int | None) -> None:
        super().__init__(source, vocab)
        self.separator = separator

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = super().__getitem__(index)
        draws = np.random.Generator(np.random.Philox(key=index))
        valid = draws.integers(0, len(labels) + 1)
        if self.separator is not None:
            tokens = np.where(draws.random(len(tokens)) < 1 / MEAN_DOCUMENT_TOKENS, self.separator, tokens)
        return tokens, np.where(np.arange(len(labels)) < valid, labels, IGNORE_INDEX)
