"""Trains two encoders with two losses on two processes: pairs must match, and each query must find its category.

python examples/two_towers.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


class TwoTowers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.item = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.category = nn.Linear(width, 4)

    def forward(self, query: Tensor, item: Tensor) -> dict[str, Tensor]:
        left, right = self.query(query), self.item(item)
        return {"similarity": F.cosine_similarity(left, right), "category": self.category(left)}


class Pairs:
    """A query, an item that matches it or not, and the query's category. A sample depends only on its index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, object]:
        query, other = torch.randn(2, 8, generator=torch.Generator().manual_seed(index))
        item = query.flip(0) if index % 2 else other
        return {"query": query, "item": item, "match": float(index % 2), "labels": int(query[:4].argmax())}


def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns several sums: their sum is the loss, and each is recorded by its name."""
    return {
        "matching": F.mse_loss(outputs["similarity"], batch["match"], reduction="sum"),
        "category": F.cross_entropy(outputs["category"], batch["labels"], reduction="sum"),
    }


CONFIG = RunConfig(
    steps=60,
    batch=BatchConfig(global_=64, micro=16),
    layout=LayoutConfig(replicate=2),
    eval=EvalConfig(holdout=0.1, every=30, samples=96),
)

if __name__ == "__main__":
    result = train(CONFIG, model=TwoTowers(), loss=loss, source=Pairs(), run="runs/towers")
    print(f"loss {result.loss:.3f} after {result.steps} steps")
