"""Small models of users that are correct: token models with blocks, an image classifier, and their data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from meshwright.core.parallel.parallel_spec import ParallelSpec

VOCAB, WIDTH, SEQUENCE = 16, 8, 6


class TokenSource:
    """Token sequences, of which the last tokens of some are padding: masked labels."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCAB, SEQUENCE + 1)
        labels = tokens[1:].copy()
        labels[SEQUENCE - index % 3 :] = -100
        return tokens[:-1], labels


class Texts:
    """Dicts with token sequences of different lengths, which `pad` makes a batch of."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        tokens = np.random.default_rng(index).integers(0, VOCAB, 3 + index % 4)
        return {"labels": tokens[1:], "tokens": tokens[:-1]}


def pad(samples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Pads to the longest sample of the batch; padded labels are ignored."""
    size = max(len(sample["tokens"]) for sample in samples)
    batch = {"tokens": np.zeros((len(samples), size), np.int64), "labels": np.full((len(samples), size), -100)}
    for row, sample in enumerate(samples):
        for name, values in sample.items():
            batch[name][row, : len(values)] = values
    return batch


class Points:
    """Vectors with a class."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        random = np.random.default_rng(index)
        return random.standard_normal(WIDTH).astype(np.float32), int(random.integers(0, 4))


class Block(nn.Module):
    """A feed-forward block with a residual connection and a scale inside of the sharded region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(self.norm(x))))

    def inner(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)


class TokenModel(nn.Module):
    """An embedding, blocks, a norm and a head."""

    block: type[Block] = Block

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden_states(tokens)))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """What the blocks return."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Classifier(nn.Module):
    """A network without blocks."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def text_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return token_loss(logits, batch["labels"])


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def block_plan() -> dict[str, object]:
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


TENSOR_SPEC = ParallelSpec(blocks="blocks.*", tp_plan=block_plan)
