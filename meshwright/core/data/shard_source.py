"""A source over token shards: samples are consecutive sequences of the array of all tokens. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.core.data.shards import TokenShards
from meshwright.core.data.source import Sample, content_digest, masked_tokens
from meshwright.errors import DataError


class ShardSource:
    """Token shards without masks, split into samples of `sequence` tokens. The label of a token is the next token."""

    def __init__(self, shards: TokenShards, sequence: int, vocab: int) -> None:
        self.shards, self.sequence, self.name = shards, sequence, str(shards.folder)
        self.notes: tuple[str, ...] = ()
        if len(shards) <= sequence:
            raise DataError(
                f"source {self.name} is empty: it has {len(shards)} token(s), and one sample needs {sequence + 1}",
                "try more data or a shorter data.sequence",
            )
        if shards.index.largest_id >= vocab:
            raise DataError(
                f"source {self.name} contains token id {shards.index.largest_id}, but model.vocab = {vocab}",
                "try a larger model.vocab, or data of the matching tokenizer",
            )

    def __len__(self) -> int:
        return (len(self.shards) - 1) // self.sequence

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.sequence
        tokens = self.shards.gather("tokens", start, start + self.sequence + 1).astype(np.int64)
        return tokens[:-1], tokens[1:]

    def fingerprint(self) -> str:
        return content_digest("shards", self.shards.digest, self.sequence)

    def raise_if_changed(self) -> None:
        """Raises DataError if a shard that was read has other content now."""
        self.shards.raise_if_changed()

    def masked_sample(self) -> Sample:
        return masked_tokens(self.sequence)
