"""The checks of the lab on tensor-parallel linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.base.io import format_bytes
from meshwright.testing import World
from meshwright_practice.labs.instruments.message_log import MessageEvent, MessageLog, describe_kinds, sent_bytes
from meshwright_practice.labs.instruments.saved_tensors import saved_tensors
from meshwright_practice.labs.work import Work

RANKS, ROWS, WIDTH, HIDDEN = 2, 6, 8, 64
TOLERANCE = 1e-10


@dataclass(frozen=True)
class DenseMlp:
    """The inputs of the lab, the same on every rank, and what one process computes from them."""

    x: Tensor
    up: Tensor
    down: Tensor
    bias: Tensor

    @classmethod
    def build(cls) -> DenseMlp:
        generator = torch.Generator().manual_seed(0)
        shapes = ((ROWS, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,))
        return cls(*(torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes))

    def hidden(self) -> Tensor:
        return self.x @ self.up.T

    def output(self) -> Tensor:
        return F.gelu(self.hidden()) @ self.down.T + self.bias

    def gradients(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.output().square().sum(), (self.x, self.up, self.down, self.bias))


@dataclass(frozen=True)
class TensorParallelRecord:
    """What one rank has seen."""

    column: Tensor
    row: Tensor
    output: Tensor
    gradients: list[Tensor]
    forward: list[MessageEvent]
    backward: list[MessageEvent]
    saved: int


def slices(dense: DenseMlp, rank: int) -> tuple[Tensor, Tensor]:
    """The right shards of both weights."""
    return dense.up.chunk(RANKS, 0)[rank], dense.down.chunk(RANKS, 1)[rank]


def exercise(world: World, module: ModuleType) -> TensorParallelRecord:
    dense, log = DenseMlp.build(), MessageLog(world.size)
    up, down = (shard.detach().clone().requires_grad_() for shard in slices(dense, world.rank))
    x, bias = (tensor.detach().clone().requires_grad_() for tensor in (dense.x, dense.bias))
    with torch.no_grad():
        column = module.column_linear(x, up)
        row = module.row_linear(dense.hidden().chunk(RANKS, 1)[world.rank].contiguous(), down, bias)
    with log, saved_tensors() as saved:
        output = module.mlp(x, up, down, bias)
        forward = log.take()
    with log:
        output.square().sum().backward()
    gradients = [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in (x, up, down, bias)]
    return TensorParallelRecord(column, row, output.detach(), gradients, forward, log.events, saved.bytes)


def off(found: Tensor, expected: Tensor) -> bool:
    return found.shape != expected.shape or bool((found - expected).abs().max() > TOLERANCE)


def describe(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return f"a difference of {float((found - expected).detach().abs().max()):.3g}"


def check_shards(work: Work) -> None:
    dense = DenseMlp.build()
    for rank in range(RANKS):
        found = (work.module.shard_column(dense.up, rank, RANKS), work.module.shard_row(dense.down, rank, RANKS))
        for name, shard, right in zip(("shard_column", "shard_row"), found, slices(dense, rank), strict=True):
            if shard.shape != right.shape:
                message = (
                    f"{name} divides {'output' if name == 'shard_column' else 'input'} features: another dimension"
                )
            else:
                message = "the features of a rank are consecutive, in the order of ranks"
            if off(shard, right):
                expected = f"{name} of rank {rank} has shape {tuple(right.shape)}"
                work.stop("shards", expected, describe(shard, right), message)
    work.check("shards", True, "consecutive output features, and input features", "they are", "")


def check_outputs(work: Work, records: list[TensorParallelRecord]) -> bool:
    """The layers by themselves, and together. Returns whether all are right."""
    dense = DenseMlp.build()
    row = (dense.hidden() @ dense.down.T + dense.bias).detach()
    passed = True
    for name, expected, message in (
        ("column output", "x @ weight_shard.T", "forward needs no message: each rank has other output features"),
        ("row output", "the sum over ranks of x_shard @ weight_shard.T, plus the bias", ""),
        ("mlp output", "the output of the dense MLP", "column_linear, then GELU, then row_linear"),
    ):
        wrong = ""
        for rank, record in enumerate(records):
            pairs = {
                "column output": (record.column, dense.hidden().chunk(RANKS, 1)[rank].detach()),
                "row output": (record.row, row),
                "mlp output": (record.output, dense.output().detach()),
            }
            if off(*pairs[name]) and not wrong:
                wrong = f"rank {rank}: {describe(*pairs[name])}"
                if name == "row output":
                    message = explain_row(record.row, row, dense.bias)
        work.check(name, not wrong, expected, wrong or "the same", message)
        if wrong:
            return False
    return passed


def explain_row(found: Tensor, right: Tensor, bias: Tensor) -> str:
    if found.shape == right.shape and not off(found - (RANKS - 1) * bias, right):
        return "the bias is added once per rank: add it after the all-reduce"
    if found.shape == right.shape and not off((found - bias) * RANKS + bias, right):
        return "this is the mean of the products: the all-reduce sums, and nothing is divided"
    return "all-reduce the products of all ranks, then add the bias"


def check_gradients(work: Work, records: list[TensorParallelRecord]) -> None:
    x, up, down, bias = DenseMlp.build().gradients()
    for name, indices, message in (
        (
            "gradient of x",
            (0,),
            "each rank has a part of the gradient of x: all-reduce it in backward of column_linear",
        ),
        (
            "gradients of weights",
            (1, 2),
            "every part of a sum has the gradient of the sum: backward of the all-reduce in row_linear is the identity",
        ),
        ("gradient of bias", (3,), "the bias is the same on all ranks, and so is its gradient: it is not summed"),
    ):
        wrong = ""
        for rank, record in enumerate(records):
            rights = (x, up.chunk(RANKS, 0)[rank], down.chunk(RANKS, 1)[rank], bias)
            for index in indices:
                found, right = record.gradients[index], rights[index]
                if off(found, right) and not wrong:
                    twice = not off(found / RANKS, right)
                    wrong = f"rank {rank}: " + (f"{RANKS} times the gradient" if twice else describe(found, right))
                    message = "it is summed over ranks twice" if twice and index == 0 else message
        expected = "the gradient of the dense MLP" + (", this rank's part" if len(indices) > 1 else "")
        work.check(name, not wrong, expected, wrong or "the same", message)


def check_messages(work: Work, records: list[TensorParallelRecord]) -> None:
    size = ROWS * WIDTH * 8
    for name, events, message in (
        ("messages in forward", records[0].forward, "the hidden features stay divided; only the output is summed"),
        ("messages in backward", records[0].backward, "only the gradient of x is summed; weights have other shards"),
    ):
        kinds = describe_kinds(events)
        work.check(
            name,
            kinds == "1 all_reduce" and sent_bytes(events) == 2 * (RANKS - 1) * size // RANKS,
            f"1 all_reduce of {size:,} bytes, the size of x",
            f"{kinds} of {sum(event.bytes for event in events):,} bytes",
            message,
        )


def grade(work: Work) -> None:
    with work.user_code("shards"):
        check_shards(work)
    records = work.ranks("2 ranks return", exercise, RANKS, work.module)
    if check_outputs(work, records):
        check_gradients(work, records)
    check_messages(work, records)
    elements = 2 * ROWS * WIDTH + (2 * WIDTH * HIDDEN + 3 * ROWS * HIDDEN) // RANKS
    saved, limit = max(record.saved for record in records), 8 * elements
    work.check(
        "saved tensors",
        saved <= limit,
        f"at most {format_bytes(limit)}: x, this rank's weights, and its part of the hidden features",
        format_bytes(saved),
        "no rank has full weights or all hidden features: do not gather them",
    )
