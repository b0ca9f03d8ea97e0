"""Which chunks of each sequence a context-parallel rank has.

The ring gives rank r of C the chunks r and 2C-1-r of 2C, so that every rank has the same causal attention work in every
step of the ring. All-to-all gives rank r the chunk r of C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.core.models.layers.attention import document_ids
from meshwright.core.models.layers.rotary import RotaryEmbedding
from meshwright.errors import ConfigError

ContextMethod = Literal["ring", "all-to-all"]


@dataclass(frozen=True)
class SequenceChunks:
    """The chunks of one rank."""

    method: ContextMethod
    ranks: int
    rank: int

    def spans(self, sequence: int) -> list[range]:
        """The token positions of the rank's chunks in a sequence of this length, in order."""
        chunks = self.ranks * (2 if self.method == "ring" else 1)
        if sequence % chunks:
            raise ConfigError(
                f"a sequence of {sequence} tokens does not divide into {chunks} chunks of equal size, which "
                f"layout.context = {self.ranks} with context.method = {self.method} needs",
                f"expected a multiple of {chunks}",
            )
        size = sequence // chunks
        local = (self.rank, chunks - 1 - self.rank) if self.method == "ring" else (self.rank,)
        return [range(chunk * size, (chunk + 1) * size) for chunk in local]

    def positions(self, sequence: int, device: torch.device | None = None) -> Tensor:
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans(sequence)])

    def select(self, full: Tensor, dim: int = 1) -> Tensor:
        """The rank's chunks of a tensor over full sequences."""
        return torch.cat([full.narrow(dim, span.start, len(span)) for span in self.spans(full.shape[dim])], dim)

    def for_rank(self, rank: int) -> SequenceChunks:
        return SequenceChunks(self.method, self.ranks, rank)


class ChunkRotaryEmbedding(RotaryEmbedding):
    """Rotary tables at the positions that the rank's tokens have in their full sequences."""

    def __init__(self, rotary: RotaryEmbedding, chunks: SequenceChunks) -> None:
        super().__init__(rotary.head_size, rotary.theta, rotary.scaling)
        self.chunks = chunks

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return self.chunks.positions(tokens * self.chunks.ranks, device)


def local_chunk(
    batch: tuple[Tensor, ...], chunks: SequenceChunks | None, separator: int | None, built_in: bool = False
) -> tuple[Tensor, ...]:
    """The rank's chunks of all tensors of a batch that have a sequence dimension, which is their second. With a
    separator, the first tensor has the tokens, and the document ids of the full sequences are added: a chunk, or a
    pipeline stage that never sees the tokens, could not find them. In a batch of a built-in model, a third tensor of
    integers has the documents already; one of floats has values per token.
    """
    local = batch
    documents = document_ids(batch[0], separator)
    if built_in and len(batch) > 2 and not batch[-1].is_floating_point():
        local, documents = batch[:-1], batch[-1]
    if chunks is not None:
        length = sequence_length(batch)
        local = tuple(chunks.select(t) if t.ndim > 1 and t.shape[1] == length else t for t in local)
    return local if documents is None else (*local, documents)


def sequence_length(batch: tuple[Tensor, ...]) -> int:
    """The length of the sequences of a batch: the second dimension of its first tensor of integers that has one."""
    for tensor in batch:
        if tensor.ndim > 1 and not tensor.is_floating_point():
            return tensor.shape[1]
    raise ConfigError(
        "context parallelism divides sequences, and the batch has no tensor of shape (samples, tokens) of integers",
        "expected token ids, or labels per token; or try layout.context = 1",
    )


def require_full_documents(documents: Tensor | None, sequence: int) -> None:
    """Raises if document ids are not those of full sequences."""
    if documents is not None and documents.shape[1] != sequence:
        raise ValueError(f"document ids cover {documents.shape[1]} tokens; expected the full sequence of {sequence}")
