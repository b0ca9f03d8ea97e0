"""The checks of the lab on the 1F1B schedule."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.topology.schedule_orders import flatten_actions, loop_order
from meshwright.testing import World
from meshwright_practice.labs.instruments.message_log import MessageEvent, MessageLog
from meshwright_practice.labs.work import Work

STAGES, MICRO_BATCHES, ROWS, WIDTH = 4, 6, 3, 8
SHAPE = (ROWS, WIDTH)
FEW = 2
"""Fewer micro-batches than stages."""
Order = list[tuple[str, int]]


@dataclass(frozen=True)
class StageRecord:
    """What one stage has done."""

    losses: list[float]
    gradients: list[Tensor]
    executed: str
    """such as FFFBFB, from hooks of the module"""
    live: int
    """the largest number of outputs of the stage that existed at once"""
    events: list[MessageEvent]


def expected_order(stage: int, stages: int, micro_batches: int) -> Order:
    order = loop_order("1f1b", stage, stages, micro_batches, 1)
    return [(action.op, action.micro_batch) for action in flatten_actions(order)]


def build_stage(stage: int) -> nn.Module:
    generator = torch.Generator().manual_seed(stage)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2
    return module


def batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(MICRO_BATCHES)]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@dataclass
class StageWatch:
    """Hooks of a stage: the order of forwards and backwards, and how many of its outputs are alive."""

    executed: str = ""
    alive: int = 0
    most: int = 0

    def forward(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.executed += "F"
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(output, self.end)
        if output.requires_grad:
            output.register_hook(self.backward)

    def backward(self, _gradient: Tensor) -> None:
        self.executed += "B"

    def end(self) -> None:
        self.alive -= 1


def exercise(world: World, user: ModuleType) -> StageRecord:
    module, watch = build_stage(world.rank), StageWatch()
    module.register_forward_hook(watch.forward)
    with MessageLog(world.size) as log:
        losses = user.pipeline_step(module, batches(0), batches(1), squared_error, SHAPE)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return StageRecord([float(loss) for loss in losses or []], gradients, watch.executed, watch.most, log.events)


def reference() -> tuple[list[float], list[list[list[Tensor]]]]:
    """The losses of one process, and the gradients by micro-batch, stage and parameter."""
    stages = [build_stage(stage) for stage in range(STAGES)]
    losses, gradients = [], []
    for inputs, target in zip(batches(0), batches(1), strict=True):
        output = inputs
        for stage in stages:
            output = stage(output)
        loss = squared_error(output, target)
        losses.append(float(loss))
        parameters = [list(stage.parameters()) for stage in stages]
        gradients.append([list(torch.autograd.grad(loss, of_stage, retain_graph=True)) for of_stage in parameters])
    return losses, gradients


def explain_order(found: object, expected: Order, stage: int, stages: int) -> str:
    """Says how an order differs from 1F1B."""
    if not isinstance(found, list) or not all(isinstance(action, tuple) and len(action) == 2 for action in found):
        return 'return a list of pairs such as ("F", 0)'
    kinds = "".join(str(kind) for kind, _ in found)
    if sorted(found) != sorted(expected):
        return "every micro-batch has one forward and one backward: count them"
    micro_batches = len(expected) // 2
    if kinds == "F" * micro_batches + "B" * micro_batches:
        return "this is GPipe: all forwards, then all backwards; start backwards as soon as the warm-up is over"
    ahead = len(kinds) - len(kinds.lstrip("F")) - 1
    wanted = min(stages - stage - 1, micro_batches)
    if ahead > wanted:
        return "the warm-up is too long: stage s has only P - s - 1 stages behind it to fill"
    if ahead < wanted:
        return "the warm-up is too short: stage s needs P - s - 1 forwards before it alternates"
    return "forwards and backwards each go through the micro-batches in their order"


def check_order(work: Work, name: str, micro_batches: int) -> None:
    for stage in range(STAGES):
        expected = expected_order(stage, STAGES, micro_batches)
        found = work.module.schedule(stage, STAGES, micro_batches)
        if found != expected:
            texts = [" ".join(f"{kind}{i}" for kind, i in order) for order in (expected,)]
            shown = " ".join("".join(map(str, action)) for action in found) if isinstance(found, list) else found
            where = f"stage {stage} of {STAGES}, {micro_batches} micro-batches: "
            work.check(name, False, where + texts[0], shown, explain_order(found, expected, stage, STAGES))
            return
    work.check(name, True, f"1F1B on {STAGES} stages with {micro_batches} micro-batches", "1F1B on every stage", "")


def explain_gradients(found: Tensor, parts: list[Tensor]) -> str:
    total = torch.stack(parts).sum(0)
    if not found.any():
        return "the gradients are zero: does output.backward get the gradient that the next stage sends?"
    if torch.allclose(found, parts[-1], rtol=1e-10):
        return "these are the gradients of the last micro-batch alone: they add up over micro-batches"
    ratio = found / total
    if bool((ratio - ratio.flatten()[0]).abs().max() < 1e-10):
        return f"they are {ratio.flatten()[0]:.4g} times the right ones: the loss of the step is the sum, not the mean"
    if any(torch.allclose(found, total - part, rtol=1e-10) for part in parts):
        return "one micro-batch is missing"
    return "does every backward use the output, and the received gradient, of its own micro-batch?"


def check_numbers(work: Work, records: list[StageRecord]) -> None:
    losses, gradients = reference()
    found = records[-1].losses
    equal = len(found) == len(losses) and torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=1e-6)
    work.check(
        "losses",
        equal,
        f"the last stage returns the losses {[round(loss, 4) for loss in losses]}",
        [round(loss, 4) for loss in found],
        "the last stage returns one loss per micro-batch, in their order",
    )
    for stage, record in enumerate(records):
        for number, gradient in enumerate(record.gradients):
            parts = [of_batch[stage][number] for of_batch in gradients]
            error = float((gradient - torch.stack(parts).sum(0)).abs().max())
            if error > 1e-10:
                what = f"stage {stage}, parameter {number}: the largest difference is {error:.3g}"
                work.check("gradients", False, "those of one process", what, explain_gradients(gradient, parts))
                return
    work.check("gradients", True, "those of one process within 1e-10", "equal on every stage", "")


def check_schedule(work: Work, records: list[StageRecord]) -> None:
    expected = ["".join(kind for kind, _ in expected_order(s, STAGES, MICRO_BATCHES)) for s in range(STAGES)]
    executed = [record.executed for record in records]
    work.check(
        "executed order",
        executed == expected,
        f"forwards and backwards by stage: {', '.join(expected)}",
        ", ".join(executed),
        "pipeline_step follows the order of schedule; each micro-batch goes through the module once",
    )
    bounds = [min(STAGES - stage, MICRO_BATCHES) for stage in range(STAGES)]
    live = [record.live for record in records]
    work.check(
        "live activations",
        all(count <= bound for count, bound in zip(live, bounds, strict=True)),
        f"at most {bounds} outputs alive on the stages",
        live,
        "let go of the input and the output of a micro-batch in its backward: a list that keeps them keeps the graph",
    )


def check_bytes(work: Work, records: list[StageRecord]) -> None:
    """Each boundary carries one activation per micro-batch in each direction."""
    size = ROWS * WIDTH * 8 * MICRO_BATCHES
    wanted = [size * ((stage < STAGES - 1) + (stage > 0)) for stage in range(STAGES)]
    sent = [sum(e.bytes for e in record.events if e.kind not in ("receive", "wait", "mark")) for record in records]
    neighbours = all(
        abs(event.peer - stage) == 1
        for stage, record in enumerate(records)
        for event in record.events
        if event.kind == "send"
    )
    work.check(
        "bytes",
        sent == wanted and neighbours,
        f"{wanted} bytes sent by the stages, to neighbours only",
        f"{sent}{'' if neighbours else ', not only to neighbours'}",
        "a stage sends one activation forward and one gradient back per micro-batch, of the shape of the activations",
    )


def grade(work: Work) -> None:
    with work.attempt("schedule returns"):
        for micro_batches in (MICRO_BATCHES, FEW):
            work.module.schedule(0, STAGES, micro_batches)
    check_order(work, "order", MICRO_BATCHES)
    check_order(work, "few micro-batches", FEW)
    records = work.ranks("4 ranks return", exercise, STAGES, work.module)
    check_numbers(work, records)
    check_schedule(work, records)
    check_bytes(work, records)
