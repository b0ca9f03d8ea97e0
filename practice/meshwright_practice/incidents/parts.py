"""The model, loss and data of a team that trains its own: right ones, and ones that are wrong on purpose."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright_practice.incidents.classes.wrong import VOCABULARY

WIDTH, BLOCKS, LENGTH, SAMPLES = 64, 3, 48, 4096
SHORTEST = LENGTH // 4
IGNORED = -100
CACHE_NUMEL = 1 << 22
"""Elements of a tensor that the model keeps: 16 MiB."""
CACHE: list[Tensor] = []
PASSES = [0]
"""The forward passes of this process."""
TASKS: list[tuple[str, int, int, int]] = []
"""What the model does beside its work: a task, the rank that has it, the pass from which on, and a count. The launcher
sets it in its own process, from which the ranks are forked."""


class TeamBlock(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return output


class TeamModel(nn.Module):
    """Predicts the next token. Its head is zero at first, so that its outputs are uniform."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TeamBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        PASSES[0] += 1
        for task, rank, first, count in TASKS:
            if rank == current_rank() and PASSES[0] > first:
                hidden = DISTURBANCES[task](hidden, count)
        logits: Tensor = self.head(hidden)
        return logits


def current_rank() -> int | None:
    """The rank of a job; None in the process that checks the first batch."""
    return dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else None


def keep_tensors(hidden: Tensor, count: int) -> Tensor:
    """Keeps a tensor of every pass. The address space has room for `count` of them."""
    if not CACHE:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * CACHE_NUMEL * count, resource.RLIM_INFINITY))
    CACHE.append(torch.ones(CACHE_NUMEL))
    return hidden


def divide_by_zero(hidden: Tensor, _count: int) -> Tensor:
    """Normalizes by a sum that is zero."""
    return hidden * (hidden - hidden).sum() / (hidden - hidden).sum()


DISTURBANCES: dict[str, Callable[[Tensor, int], Tensor]] = {"memory": keep_tensors, "zero": divide_by_zero}


class TeamSource:
    """Sequences of different lengths, padded to the longest; sample i is a function of i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        random = np.random.default_rng((7, index))
        length = int(random.integers(SHORTEST, LENGTH + 1))
        stride = int(random.integers(1, 4))
        tokens = (int(random.integers(VOCABULARY)) + stride * np.arange(LENGTH + 1)) % VOCABULARY
        targets = np.where(np.arange(LENGTH) < length, tokens[1:], IGNORED)
        return tokens[:-1].astype(np.int64), targets.astype(np.int64)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token; that of padding is zero."""
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(targets)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over the valid tokens of all sequences."""
    return token_losses(logits, targets).sum()


def sequence_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the valid tokens of each sequence times its length, summed: a wrong one."""
    valid = (targets != IGNORED).sum(dim=1).clamp(min=1)
    return (token_losses(logits, targets).sum(dim=1) / valid * targets.shape[1]).sum()


def arrange_parts(name: str) -> dict[str, Any]:
    """The arguments of `meshwright.train` for the parts of an act, `LOSS[/TASK:RANK:PASS:COUNT]`; none for the built-in
    model.
    """
    TASKS.clear()
    loss, _, task = name.partition("/")
    if not loss:
        return {}
    if task:
        kind, *numbers = task.split(":")
        rank, first, count = map(int, numbers)
        TASKS.append((kind, rank, first, count))
    losses = {"tokens": summed_loss, "sequences": sequence_loss}
    return {"model": TeamModel, "loss": losses[loss], "source": TeamSource()}
