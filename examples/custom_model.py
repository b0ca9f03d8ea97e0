"""Trains your own model, loss and dataset on two processes with the code that trains the built-in decoder.

python examples/custom_model.py            two ranks on this host
torchrun --nproc-per-node 2 examples/custom_model.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, OptimizerConfig


class Spirals:
    """A map-style dataset of points on two interleaved spirals. A sample depends only on its index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        angle = 3 * math.pi * math.sqrt((index // 2 + 0.5) / 2048)
        point = torch.tensor([math.cos(angle + math.pi * label), math.sin(angle + math.pi * label)])
        return point * angle / 10, label


def summed_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum, not the mean: Meshwright divides once by the number of targets over all ranks and micro-steps."""
    return F.cross_entropy(outputs, targets, reduction="sum")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
    config = RunConfig(
        steps=400,
        batch=BatchConfig(global_=128),
        optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.0),
        eval=EvalConfig(holdout=0.1, every=100, samples=409),
        log_every=50,
    )
    result = train(config, model=model, loss=summed_cross_entropy, source=Spirals(), run="runs/spirals")
    spirals = Spirals()
    points = torch.stack([spirals[i][0] for i in range(len(spirals))])
    labels = torch.arange(len(spirals)) % 2
    accuracy = (model(points).argmax(dim=1) == labels).float().mean()
    print(f"{accuracy:.1%} of all points on the right spiral after {result.steps} steps")
