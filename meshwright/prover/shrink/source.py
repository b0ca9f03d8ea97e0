"""The user's data with the small vocabulary of a proof run. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.config import IGNORE_INDEX, RunConfig
from meshwright.data.file_sources import open_sources
from meshwright.data.source import Sample, Source, content_digest
from meshwright.prover.shrink.runs import ProofRun


def open_proof_sources(config: RunConfig, run: ProofRun) -> list[Source]:
    """The sources of the user's config with the sequence length and the vocabulary of a proof run."""
    opened = open_sources(run.config.data, config.model.vocab, config.model.separator)
    return [ModuloSource(source, run.config.model.vocab, run.masked_labels) for source in opened]


class ModuloSource:
    """A source whose token ids are taken modulo a small vocabulary. With `masked_labels`, the labels of each sample are
    masked after a random length, which depends on its index alone.
    """

    def __init__(self, source: Source, vocab: int, masked_labels: bool = False) -> None:
        self.source, self.vocab, self.masked_labels = source, vocab, masked_labels
        self.name = f"{source.name} modulo {vocab}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self.source[index]
        labels = np.where(labels == IGNORE_INDEX, IGNORE_INDEX, labels % self.vocab)
        if self.masked_labels:
            valid = np.random.Generator(np.random.Philox(key=index)).integers(0, len(labels) + 1)
            labels = np.where(np.arange(len(labels)) < valid, labels, IGNORE_INDEX)
        return tokens % self.vocab, labels

    def fingerprint(self) -> str:
        return content_digest("modulo", self.vocab, self.masked_labels, self.source.fingerprint())

    def masked_sample(self) -> Sample:
        return self.source.masked_sample()
