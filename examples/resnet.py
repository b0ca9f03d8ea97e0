"""Trains a small ResNet with synchronized batch normalization on two processes.

python examples/resnet.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


def build() -> nn.Module:
    """Batch statistics of each rank would make the result depend on the layout: they are computed over all ranks."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *(Residual(16) for _ in range(3)), head)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


class Stripes:
    """Noisy images of horizontal (0) or vertical (1) stripes. A sample depends only on its index."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(index))
        stripes = (torch.arange(12) // 2 % 2).float().expand(1, 12, 12)
        return noise + (stripes if index % 2 else stripes.mT), index % 2


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


CONFIG = RunConfig(
    steps=40,
    batch=BatchConfig(global_=32, micro=16),
    layout=LayoutConfig(replicate=2),
    eval=EvalConfig(holdout=0.1, every=20, samples=96),
)

if __name__ == "__main__":
    train(CONFIG, model=build(), loss=loss, source=Stripes(), metrics={"accuracy": accuracy}, run="runs/resnet")
