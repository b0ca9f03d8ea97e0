"""Packs chats into samples: several chats per sample, whose tokens do not attend to each other. Torch-free.

Chats are packed by best fit in the order of decreasing length: each goes to the fullest sample that still has room for
it. The result depends on the lengths alone, so the samples are the same on every layout and after every restart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.shards import TokenShards
from meshwright.core.data.source import Sample, Source, content_digest, masked_tokens
from meshwright.errors import DataError


class PackedChats:
    """Samples of (tokens, labels, documents) over token shards with masks. A chat of n tokens takes n - 1 positions:
    each predicts the next token of the chat, and counts in the loss where the mask of that token is 1. A chat that is
    longer than the sequence is truncated; a chat without an answer before that is left out.

    Without packing, a sample is (tokens, labels) of one chat.
    """

    def __init__(self, shards: TokenShards, sequence: int, vocab: int, packed: bool, name: str = "") -> None:
        self.shards, self.sequence, self.packed = shards, sequence, packed
        self.name = name or str(shards.folder)
        if shards.index.largest_id >= vocab:
            raise DataError(
                f"source {self.name} contains token id {shards.index.largest_id}, but model.vocab = {vocab}",
                "try a larger model.vocab, or data of the matching tokenizer",
            )
        positions = np.minimum(shards.lengths - 1, sequence)
        answers = count_answers(shards, positions)
        chats = np.flatnonzero(answers > 0)
        if not len(chats):
            raise DataError(
                f"source {self.name} is empty: no chat has an answer in its first {sequence} tokens",
                "try a longer data.sequence, or other chats",
            )
        self.samples = pack(chats, positions[chats], sequence) if packed else [[int(chat)] for chat in chats]
        self.notes = self._notes(shards.lengths - 1, chats)

    def _notes(self, lengths: NDArray[np.int64], chats: NDArray[np.int64]) -> tuple[str, ...]:
        total, truncated = len(lengths), int((lengths[chats] > self.sequence).sum())
        longest = f"{self.sequence} tokens (data.sequence); the longest chat has {int(lengths.max()):,}"
        notes = []
        if total > len(chats):
            left_out = f"{total - len(chats):,} of {total:,} chats are left out"
            notes.append(f"{self.name}: {left_out}, because they have no answer in their first {longest}")
        if truncated:
            notes.append(f"{self.name}: {truncated:,} of {total:,} chats are truncated to {longest}")
        return tuple(notes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens, labels = masked_tokens(self.sequence)
        documents = np.full(self.sequence, len(self.samples[index]), np.int64)  # what remains is a document of its own
        start = 0
        for document, chat in enumerate(self.samples[index]):
            ids, mask = self.shards.document(chat)
            assert mask is not None
            ids, mask = ids[: self.sequence + 1].astype(np.int64), mask[: self.sequence + 1]
            end = start + len(ids) - 1
            tokens[start:end], documents[start:end] = ids[:-1], document
            labels[start:end] = np.where(mask[1:] != 0, ids[1:], IGNORE_INDEX)
            start = end
        return (tokens, labels, documents) if self.packed else (tokens, labels)

    @cached_property
    def _fingerprint(self) -> str:
        return content_digest("chats", self.shards.digest, self.sequence, self.packed)

    def fingerprint(self) -> str:
        return self._fingerprint

    def raise_if_changed(self) -> None:
        """Raises DataError if a shard that was read has other content now."""
        self.shards.raise_if_changed()

    def masked_sample(self) -> Sample:
        tokens, labels = masked_tokens(self.sequence)
        return (tokens, labels, np.zeros(self.sequence, np.int64)) if self.packed else (tokens, labels)


def count_answers(shards: TokenShards, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of labels of every document that count in the loss."""
    first = shards.ends - shards.lengths + 1
    end = np.maximum(first, first + positions)
    counts, size = np.zeros(len(first), np.int64), shards.index.shard_tokens
    for number, shard in enumerate(shards.index.shards):
        start = number * size
        inside = np.flatnonzero((first < start + shard.tokens) & (end > start) & (end > first))
        if len(inside):
            edges = np.clip(np.stack([first[inside], end[inside]], 1) - start, 0, shard.tokens)
            counted = np.append(shards.map("mask", number) != 0, False)  # an edge may be the end of the shard
            counts[inside] += np.add.reduceat(counted, edges.ravel(), dtype=np.int64)[::2]
    return counts


def pack(chats: NDArray[np.int64], lengths: NDArray[np.int64], sequence: int) -> list[list[int]]:
    """The chats of every sample. Chats keep their order within a sample, and samples are in the order of their first
    chat.
    """
    samples: list[list[int]] = []
    open_samples: list[tuple[int, int]] = []
    """(room, number) of samples that have room, the fullest first"""
    for chat, length in sorted(zip(chats.tolist(), lengths.tolist(), strict=True), key=lambda item: -item[1]):
        found = bisect_left(open_samples, (length, -1))
        if found == len(open_samples):
            room, number = sequence, len(samples)
            samples.append([])
        else:
            room, number = open_samples.pop(found)
        samples[number].append(chat)
        if room > length:
            insort(open_samples, (room - length, number))
    return sorted(sorted(sample) for sample in samples)


class SourceWithDocuments:
    """A source of (tokens, labels) beside packed chats in a mixture: its samples get their documents, too."""

    packed = True

    def __init__(self, source: Source, separator: int | None) -> None:
        self.source, self.separator, self.name = source, separator, source.name
        self.notes: tuple[str, ...] = getattr(source, "notes", ())

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self.source[index]
        ends = (tokens == self.separator).astype(np.int64) if self.separator is not None else np.zeros_like(tokens)
        return tokens, labels, np.cumsum(ends) - ends

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def raise_if_changed(self) -> None:
        if hasattr(self.source, "raise_if_changed"):
            self.source.raise_if_changed()

    def masked_sample(self) -> Sample:
        tokens, labels = self.source.masked_sample()
        return tokens, labels, np.zeros_like(tokens)
