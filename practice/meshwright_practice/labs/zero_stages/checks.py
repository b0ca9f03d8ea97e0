"""The checks of the lab on ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshwright.base.io import format_bytes
from meshwright.testing import World
from meshwright_practice.labs.instruments.live_memory import allocated_bytes
from meshwright_practice.labs.instruments.message_log import MARK, MessageEvent, MessageLog, describe_kinds, sent_bytes
from meshwright_practice.labs.instruments.saved_tensors import saved_tensors
from meshwright_practice.labs.work import Work

WIDTH, LAYERS, RANKS, ROWS, LR, STEPS = 16, 12, 2, 2, 0.1, 2
WEIGHT = WIDTH * WIDTH * 8
"""Bytes of one weight in float64."""
TOTAL = LAYERS * WEIGHT
TOLERANCE = 1e-10
BACKWARD_ENDED = "backward ended"


@dataclass(frozen=True)
class ZeroRecord:
    """What one rank has seen in one part."""

    tensors: list[Tensor]
    shards: list[Tensor]
    events: list[MessageEvent]
    """those of the last step"""
    peak: int = 0
    saved: int = 0
    first: list[Tensor] = field(default_factory=list)
    """weights after the first step; `tensors` are those after the last one"""


def build_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / 4 for _ in range(LAYERS)]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def output(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    return x


def loss(weights: list[Tensor], x: Tensor) -> Tensor:
    return output(weights, x).square().sum()


def leaves(weights: list[Tensor]) -> list[Tensor]:
    return [weight.detach().clone().requires_grad_() for weight in weights]


@cache
def reference() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The mean gradients and the weights after every step of plain data parallelism."""
    weights, moments = build_weights(), [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
    gradients, trained = [], []
    for step in range(STEPS):
        parts = []
        for rank in range(RANKS):
            copies = leaves(weights)
            parts.append(torch.autograd.grad(loss(copies, batch(rank, step)), copies))
        gradients.append([sum(of_rank, torch.zeros(())) / RANKS for of_rank in zip(*parts, strict=True)])
        moments = [0.9 * moment + gradient for moment, gradient in zip(moments, gradients[-1], strict=True)]
        weights = [weight - LR * moment for weight, moment in zip(weights, moments, strict=True)]
        trained.append(weights)
    return gradients, trained


def empty_shards() -> list[Tensor]:
    return [torch.zeros(WIDTH * WIDTH // RANKS, dtype=torch.float64) for _ in range(LAYERS)]


def exercise_zero1(world: World, module: ModuleType) -> ZeroRecord:
    weights, moments, log, peak = build_weights(), empty_shards(), MessageLog(world.size), 0
    first: list[Tensor] = []
    for step in range(STEPS):
        copies = leaves(weights)
        gradients = list(torch.autograd.grad(loss(copies, batch(world.rank, step)), copies))
        log.take()
        with log, allocated_bytes([*weights, *gradients, *moments], TOTAL) as allocated, torch.no_grad():
            module.zero1_step(weights, gradients, moments, LR)
        peak = max(peak, allocated.peak)
        first = first or [weight.clone() for weight in weights]
    return ZeroRecord(weights, moments, log.events, peak, first=first)


def exercise_zero2(world: World, module: ModuleType) -> ZeroRecord:
    weights, moments, shards = leaves(build_weights()), empty_shards(), empty_shards()
    log, peak = MessageLog(world.size), 0
    reduced: list[Any] = []
    first: list[Tensor] = []
    for weight in weights:  # before the user's hooks, which react to the gradient
        weight.register_post_accumulate_grad_hook(lambda _: log.mark("gradient"))
    module.zero2_attach(weights, shards)
    for step in range(STEPS):
        log.take()
        result = loss(weights, batch(world.rank, step))
        with log, allocated_bytes([*weights, *shards, *moments], 2 * TOTAL) as allocated:
            result.backward()
            log.mark(BACKWARD_ENDED)
            reduced = reduced or [shard.numpy().copy() for shard in shards]  # not counted as memory
            with torch.no_grad():
                module.zero2_step(weights, shards, moments, LR)
        peak = max(peak, allocated.peak)
        first = first or [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = None
    return ZeroRecord(
        [weight.detach() for weight in weights], list(map(torch.from_numpy, reduced)), log.events, peak, first=first
    )


def exercise_zero3(world: World, module: ModuleType) -> ZeroRecord:
    shards = [weight.view(-1).chunk(world.size)[world.rank].clone().requires_grad_() for weight in build_weights()]
    x, log = batch(world.rank, 0).requires_grad_(), MessageLog(world.size)
    with log, allocated_bytes([x, *shards], 2 * TOTAL) as allocated:
        with saved_tensors() as saved:
            y = x
            for shard in shards:
                y = torch.tanh(module.zero3_linear(y, shard, WIDTH))
        result = y.detach().clone()
        y.square().sum().backward()
    gradients = [torch.zeros(()) if shard.grad is None else shard.grad for shard in shards]
    x_gradient = torch.zeros(()) if x.grad is None else x.grad
    return ZeroRecord([result, x_gradient], gradients, log.events, allocated.peak, saved.bytes)


def off(found: Tensor, expected: Tensor) -> bool:
    return found.shape != expected.shape or bool((found - expected).abs().max() > TOLERANCE)


def chunk(tensor: Tensor, rank: int) -> Tensor:
    return tensor.reshape(-1).chunk(RANKS)[rank]


def check_weights(work: Work, part: str, records: list[ZeroRecord]) -> None:
    _, trained = reference()
    name, expected = f"{part}: weights", "the weights of plain data parallelism"
    for step, right in ((0, trained[0]), (STEPS - 1, trained[-1])):
        for rank, record in enumerate(records):
            weights = record.tensors if step else record.first
            bad = [layer for layer in range(LAYERS) if off(weights[layer], right[layer])]
            if bad:
                found = f"rank {rank}: {len(bad)} of {LAYERS} weights differ after {step + 1} steps"
                work.check(name, False, expected, found, explain_weights(weights, right, rank, step))
                return
    work.check(name, True, expected, "the same", "")


def explain_weights(weights: list[Tensor], right: list[Tensor], rank: int, step: int) -> str:
    if step:
        return "the first step is right: the moments are kept from step to step, one shard per weight"
    if not any(map(off, weights, build_weights())):
        return "the weights are as they were: the chunk is a view, and the gathered weight is written in place"
    if not any(off(chunk(found, rank), chunk(wanted, rank)) for found, wanted in zip(weights, right, strict=True)):
        return "only this rank's own shard is right: gather the shards of the others"
    return "rank r owns chunk r; the update uses the mean of the gradients and this rank's moments"


def check_bytes(work: Work, part: str, records: list[ZeroRecord], passes: int, message: str) -> None:
    ideal = passes * (RANKS - 1) * TOTAL // RANKS
    events = records[0].events
    work.check(
        f"{part}: bytes",
        sent_bytes(events) == ideal,
        f"{passes} (N - 1) / N of {format_bytes(TOTAL)}: {ideal:,} bytes per rank and step",
        f"{sent_bytes(events):,} bytes in {describe_kinds(events)}",
        message,
    )


def check_memory(work: Work, part: str, records: list[ZeroRecord], weights: float, what: str, message: str) -> None:
    peak, limit = max(record.peak for record in records), int(weights * WEIGHT)
    found = f"{format_bytes(peak)} at the peak"
    work.check(f"{part}: memory", peak <= limit, f"at most {format_bytes(limit)} {what}", found, message)


def check_shards(work: Work, name: str, records: list[ZeroRecord]) -> bool:
    """Compares gradient shards with the means."""
    gradients, _ = reference()
    for rank, record in enumerate(records):
        right = [chunk(gradient, rank) for gradient in gradients[0]]
        bad = [layer for layer in range(LAYERS) if off(record.shards[layer], right[layer])]
        if bad:
            summed = all(not off(record.shards[i] / RANKS, right[i]) for i in bad)
            other = all(not off(record.shards[i], chunk(gradients[0][i], 1 - rank)) for i in bad)
            message = (
                "only the last layer is right: the gradient of x is that of this rank's batch alone, and is not reduced"
                if len(bad) == LAYERS - 1 and LAYERS - 1 not in bad
                else "these are sums: divide by the number of ranks"
                if summed
                else "this is the chunk of another rank: rank r owns chunk r"
                if other
                else "reduce-scatter the full gradient of every rank; each rank gets the chunk of its own number"
            )
            found = f"rank {rank}: {len(bad)} of {LAYERS} gradient shards differ"
            work.check(name, False, "this rank's chunk of the mean gradient", found, message)
            return False
    return True


def grade_zero1(work: Work) -> None:
    records = work.ranks("ZeRO-1: 2 ranks return", exercise_zero1, RANKS, work.module)
    check_weights(work, "ZeRO-1", records)
    hint = "a reduce-scatter of gradients and an all-gather of weights suffice; an all-reduce sends twice as much"
    check_bytes(work, "ZeRO-1", records, 2, hint)
    hint = "do not keep full copies: work on one weight after the other"
    check_memory(work, "ZeRO-1", records, 4.0, "(four of twelve weights) beside the given tensors", hint)


def grade_zero2(work: Work) -> None:
    records = work.ranks("ZeRO-2: 2 ranks return", exercise_zero2, RANKS, work.module)
    name = "ZeRO-2: gradient shards"
    if check_shards(work, name, records):
        work.check(name, True, "this rank's chunk of the mean gradient", "it is there after backward", "")
        check_weights(work, "ZeRO-2", records)
    events = records[0].events
    ended = next(i for i, event in enumerate(events) if event.text == BACKWARD_ENDED)
    last = max((i for i, event in enumerate(events[:ended]) if event.kind == MARK), default=ended)
    reduced = [i for i, event in enumerate(events) if event.kind not in (MARK, "wait", "all_gather")]
    early = [i for i in reduced if i < last]
    work.check(
        "ZeRO-2: order",
        len(early) >= LAYERS - 1,
        f"{LAYERS - 1} of {LAYERS} gradients are reduced before the last one is ready",
        f"{len(early)} of {len(reduced)}",
        "reduce each gradient in its hook: if backward has to end first, all full gradients exist at the same time",
    )
    check_bytes(
        work, "ZeRO-2", records, 2, "one reduce-scatter per gradient and one all-gather per weight: no more, no less"
    )
    hint = "set weight.grad to None in the hook: else all full gradients stay until the end of backward"
    check_memory(work, "ZeRO-2", records, 5.0, "(five of twelve weights) beside the given tensors", hint)


def grade_zero3(work: Work) -> None:
    records = work.ranks("ZeRO-3: 2 ranks return", exercise_zero3, RANKS, work.module)
    wrong = [
        rank for rank, record in enumerate(records) if off(record.tensors[0], output(build_weights(), batch(rank, 0)))
    ]
    work.require(
        "ZeRO-3: output",
        not wrong,
        "x @ weight.T",
        f"another output on ranks {wrong}" if wrong else "the same",
        "gather the shards in the order of ranks into the shape (out_features, in_features)",
    )
    name = "ZeRO-3: gradients"
    if check_shards(work, name, records):
        ranks = [rank for rank, record in enumerate(records) if off(record.tensors[1], input_gradient(rank))]
        found = f"the gradient of x differs on ranks {ranks}" if ranks else "the same"
        hint = "the gradient of x is grad_y @ weight, of this rank's batch alone: it is not reduced"
        work.check(name, not ranks, "gradients of x, and of shards as means", found, hint)
    hint = "gather in forward and in backward, and reduce-scatter the gradient of the weight: 3 passes, no all-reduce"
    check_bytes(work, "ZeRO-3", records, 3, hint)
    saved, limit = max(record.saved for record in records), TOTAL // RANKS + 3 * LAYERS * ROWS * WIDTH * 8
    work.check(
        "ZeRO-3: saved tensors",
        saved <= limit,
        f"at most {format_bytes(limit)} for backward: shards and activations",
        format_bytes(saved),
        "save the shard, not the gathered weight, and gather again in backward",
    )
    hint = "a gathered weight lives only inside one forward or backward of its layer"
    check_memory(work, "ZeRO-3", records, 13.0, "(six weights are the gradient shards) beside x and the shards", hint)


def input_gradient(rank: int) -> Tensor:
    x = batch(rank, 0).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(build_weights(), x), x)
    return gradient


def grade(work: Work) -> None:
    grade_zero1(work)
    grade_zero2(work)
    grade_zero3(work)
