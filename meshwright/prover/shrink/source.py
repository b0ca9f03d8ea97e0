"""The user's data with the small vocabulary of a proof run. Torch-free."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import Sample, Source, content_digest, is_packed

MEAN_DOCUMENT_TOKENS = 6
DOCUMENTS = 3
"""Documents of a packed sample that is shorter than the user's."""


def open_proof_sources(config: RunConfig, proof: RunConfig, masked_labels: bool = False) -> list[Source]:
    """The sources of the user's config with the sequence length and the vocabulary of a proof run. The first tokens of
    a chat may be a question alone: its samples are parts of the user's, around answers.
    """
    data, sequence = proof.data, proof.data.sequence
    kinds = {source.kind for source in (data.mixture or (data,))}
    if kinds & {"chat", "shards"} and config.data.sequence > sequence:
        opened = open_sources(replace(data, sequence=config.data.sequence), config.model.vocab, config.model.separator)
        opened = [AnswerWindows(source, sequence, config.data.sequence) for source in opened]
    else:
        opened = open_sources(data, config.model.vocab, config.model.separator)
    model = proof.model
    if masked_labels:
        return [MaskedSource(source, model.vocab, model.separator) for source in opened]
    return [ModuloSource(source, model.vocab) for source in opened]


class AnswerWindows:
    """Windows of `length` tokens of the samples of a source, each around a label that counts. Of packed samples,
    several shorter windows are a sample, and each of them is a document.
    """

    def __init__(self, source: Source, length: int, sequence: int) -> None:
        self.source, self.length, self.count = source, length, sequence // length
        self.name, self.packed = f"{source.name} in windows of {length}", is_packed(source)
        documents = min(DOCUMENTS, length) if self.packed else 1
        self.sizes = [len(part) for part in np.array_split(np.arange(length), documents)]

    def __len__(self) -> int:
        return len(self.source) * self.count

    def __getitem__(self, index: int) -> Sample:
        number, window = divmod(index, self.count)
        return self.parts(self.source[number], window)

    def parts(self, sample: Sample, window: int) -> Sample:
        tokens, labels, *_ = sample
        answers = np.append(np.flatnonzero(labels != IGNORE_INDEX), 0)  # a sample of other data may have no label
        chosen = []
        for number, size in enumerate(self.sizes, window * len(self.sizes)):
            center = answers[number * (len(answers) - 1) // (self.count * len(self.sizes))]
            start = int(np.clip(center - size // 2, 0, len(tokens) - size))
            chosen.append(slice(start, start + size))
        columns = [np.concatenate([column[part] for part in chosen]) for column in (tokens, labels)]
        return *columns, *([np.repeat(np.arange(len(self.sizes)), self.sizes)] if self.packed else [])

    def fingerprint(self) -> str:
        return content_digest(type(self).__name__, self.length, self.source.fingerprint())

    def masked_sample(self) -> Sample:
        return self.parts(self.source.masked_sample(), 0)


class ModuloSource:
    """A source whose token ids are taken modulo a small vocabulary."""

    def __init__(self, source: Source, vocab: int) -> None:
        self.source, self.vocab = source, vocab
        self.name, self.packed = f"{source.name} modulo {vocab}", is_packed(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels, *documents = self.source[index]
        return tokens % self.vocab, np.where(labels == IGNORE_INDEX, IGNORE_INDEX, labels % self.vocab), *documents

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
        tokens, labels, *documents = super().__getitem__(index)
        draws = np.random.Generator(np.random.Philox(key=index))
        valid = draws.integers(0, len(labels) + 1)
        if self.separator is not None:
            tokens = np.where(draws.random(len(tokens)) < 1 / MEAN_DOCUMENT_TOKENS, self.separator, tokens)
        return tokens, np.where(np.arange(len(labels)) < valid, labels, IGNORE_INDEX), *documents
