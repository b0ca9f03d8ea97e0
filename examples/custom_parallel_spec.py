"""Trains your own model on four processes, with FSDP over two ranks and tensor parallelism over two.

python examples/custom_parallel_spec.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright import ParallelSpec, RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class ResidualMLP(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)  # type: ignore[no-any-return]


class SineDataset:
    """Eight numbers and the sine of their sum. A sample depends only on its index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, torch.sin(x.sum())


def summed_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum, not the mean: Meshwright divides once by the number of targets over all ranks and micro-steps."""
    return F.mse_loss(outputs, targets, reduction="sum")


def tp_plan() -> dict[str, ParallelStyle]:
    """The first matrix of a block is column-parallel and the second row-parallel: one all-reduce per block."""
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


PARALLEL_SPEC = ParallelSpec(blocks="blocks.*", tp_plan=tp_plan)

if __name__ == "__main__":
    torch.manual_seed(0)
    config = RunConfig(
        steps=100,
        batch=BatchConfig(global_=64),
        layout=LayoutConfig(replicate=2, shard="parameters", tensor=2),
        eval=EvalConfig(holdout=0.1, every=50, samples=409),
        log_every=25,
    )
    train(
        config,
        model=ResidualMLP(),
        loss=summed_squared_error,
        source=SineDataset(),
        parallel_spec=PARALLEL_SPEC,
        run="runs/sine",
    )
