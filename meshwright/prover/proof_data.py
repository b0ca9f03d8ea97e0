"""The data of proof runs: the user's own sources with token ids that fit the small vocabulary, or masked samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.config import IGNORE_INDEX, RunConfig
from meshwright.data.file_sources import open_sources
from meshwright.data.source import Sample, Source, SyntheticSource, content_digest

MASKED_SAMPLES = 1000
MEAN_DOCUMENT_TOKENS = 6


class ModuloSource:
    """A source whose token ids are taken modulo a smaller vocabulary."""

    def __init__(self, source: Source, vocab: int) -> None:
        self.source, self.vocab, self.name = source, vocab, source.name

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self.source[index]
        return tokens % self.vocab, np.where(labels == IGNORE_INDEX, labels, labels % self.vocab)

    def fingerprint(self) -> str:
        return content_digest("modulo", self.vocab, self.source.fingerprint())

    def masked_sample(self) -> Sample:
        return self.source.masked_sample()


class MaskedSource(SyntheticSource):
    """Synthetic samples whose labels are masked after a random length, different for every sample, so that ranks and
    micro-batches have unequal numbers of valid tokens. With a separator, samples consist of short documents.
    """

    def __init__(self, sequence: int, vocab: int, separator: int | None) -> None:
        super().__init__(MASKED_SAMPLES, sequence, vocab)
        self.separator = separator

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = super().__getitem__(index)
        draws = np.random.Generator(np.random.Philox(key=[index, 1]))
        valid = draws.integers(0, len(labels) + 1)
        if self.separator is not None:
            tokens = np.where(draws.random(len(tokens)) < 1 / MEAN_DOCUMENT_TOKENS, self.separator, tokens)
        return tokens, np.where(np.arange(len(labels)) < valid, labels, IGNORE_INDEX)


def proof_sources(config: RunConfig, proof: RunConfig, masked: bool) -> list[Source]:
    """The sources of a proof run of a config."""
    if masked:
        return [MaskedSource(proof.data.sequence, proof.model.vocab, proof.model.separator)]
    data = replace(config.data, sequence=proof.data.sequence)
    sources = open_sources(data, config.model.vocab, config.model.separator)
    if proof.model.vocab == config.model.vocab:
        return sources
    return [ModuloSource(source, proof.model.vocab) for source in sources]
