"""Trains a text classifier whose batches are padded to their longest sample, with ZeRO-3 on two processes.

python examples/encoder_classifier.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


class Classifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        return self.head((hidden * kept).sum(dim=1) / kept.sum(dim=1))  # type: ignore[no-any-return]


class Sentences:
    """Sentences of 3 to 12 tokens; the label says whether token 7 occurs. A sample depends only on its index."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 13, (), generator=generator))
        tokens = torch.randint(1, 24, (length,), generator=generator)
        return {"tokens": tokens, "labels": int((tokens == 7).any())}


def collate(samples: list[dict[str, object]]) -> dict[str, Tensor]:
    """Pads the sentences of a micro-batch to the longest of them."""
    tokens = nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([s["labels"] for s in samples])}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"], reduction="sum")


CONFIG = RunConfig(
    steps=40,
    batch=BatchConfig(global_=32, micro=8),
    layout=LayoutConfig(replicate=2, shard="parameters"),
    eval=EvalConfig(holdout=0.1, every=20, samples=96),
)

if __name__ == "__main__":
    train(CONFIG, model=Classifier(), loss=loss, source=Sentences(), collate=collate, run="runs/classifier")
