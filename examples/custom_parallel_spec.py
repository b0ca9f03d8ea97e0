"""A model of your own, sharded over two ranks and its matrices cut over two more: four processes, one description.

python examples/custom_parallel_spec.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright import ParallelSpec, RunConfig, train
from meshwright.config import BatchConfig, EvalConfig, LayoutConfig


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).squeeze(-1)  # type: ignore[no-any-return]


class Waves:
    """Eight numbers, and the sine of their sum; sample i is a pure function of i."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, torch.sin(x.sum())


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum, not the mean: Meshwright divides once, by the count over all ranks and micro-steps."""
    return F.mse_loss(outputs, targets, reduction="sum")


def cuts() -> dict[str, ParallelStyle]:
    """The first matrix of a block by columns, the second by rows: one sum over ranks at its end."""
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


PARALLEL_SPEC = ParallelSpec(blocks="blocks.*", tp_plan=cuts)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Residual()
    config = RunConfig(
        steps=100,
        batch=BatchConfig(global_=64),
        layout=LayoutConfig(replicate=2, shard="parameters", tensor=2),
        eval=EvalConfig(holdout=0.1, every=50, samples=409),
        log_every=25,
    )
    train(config, model=model, loss=squares, source=Waves(), parallel_spec=PARALLEL_SPEC, run="runs/waves")
