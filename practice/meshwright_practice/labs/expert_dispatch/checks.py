"""The checks of the lab on expert dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from meshwright.testing import World
from meshwright_practice.labs.instruments.message_log import MessageEvent, MessageLog, describe_kinds
from meshwright_practice.labs.work import Work

RANKS, EXPERTS, TOKENS, WIDTH = 2, 4, 10, 6
ROW = WIDTH * 8
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Results:
    """Outputs and gradients of one rank, or of its part in one process."""

    output: Tensor
    tokens: Tensor
    gates: Tensor
    experts: list[Tensor]


@dataclass(frozen=True)
class DispatchRecord:
    """What one rank has seen with balanced choices, and with all tokens at two experts."""

    balanced: Results
    uneven: Results
    events: list[MessageEvent]
    """of the forward pass with balanced choices"""


def build_expert(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module


def choices(rank: int, uneven: bool) -> Tensor:
    if uneven:
        return torch.tensor([[3, 1]]).repeat(TOKENS, 1)
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(TOKENS)])


def arguments(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(80 + rank)
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    gates = torch.rand(TOKENS, 2, dtype=torch.float64, generator=generator) + 0.5
    return tokens.requires_grad_(), gates.requires_grad_()


def gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def loss_of(output: Tensor) -> Tensor:
    return (output.square() / 2).sum()


def exercise(world: World, user: ModuleType) -> DispatchRecord:
    results: list[Results] = []
    events: list[list[MessageEvent]] = []
    for uneven in (False, True):
        tokens, gates = arguments(world.rank)
        per_rank = EXPERTS // world.size
        modules = [build_expert(world.rank * per_rank + i) for i in range(per_rank)]
        with MessageLog(world.size) as log:
            output = user.moe(tokens, choices(world.rank, uneven), gates, modules, EXPERTS)
        if output.requires_grad:
            loss_of(output).backward()
        weights = [gradient(parameter) for module in modules for parameter in module.parameters()]
        results.append(Results(output.detach(), gradient(tokens), gradient(gates), weights))
        events.append(log.events)
    return DispatchRecord(results[0], results[1], events[0])


def reference(uneven: bool) -> list[Results]:
    """The same in one process."""
    modules = [build_expert(number) for number in range(EXPERTS)]
    parts = []
    for rank in range(RANKS):
        tokens, gates = arguments(rank)
        chosen = choices(rank, uneven)
        outputs = torch.stack([module(tokens) for module in modules], dim=1)
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        output = (picked * gates[..., None]).sum(1)
        loss_of(output).backward()
        parts.append((output.detach(), gradient(tokens), gradient(gates)))
    per_rank = EXPERTS // RANKS
    grouped = [modules[rank * per_rank : (rank + 1) * per_rank] for rank in range(RANKS)]
    weights = [[gradient(p) for module in group for p in module.parameters()] for group in grouped]
    return [Results(*part, of_rank) for part, of_rank in zip(parts, weights, strict=True)]


def differs(found: Tensor, expected: Tensor) -> bool:
    return found.shape != expected.shape or not bool((found - expected).abs().max() <= TOLERANCE)


def check_route(work: Work) -> None:
    chosen = choices(0, False)
    with work.attempt("route returns"):
        order, _ = work.module.route(chosen, EXPERTS)
    flat = chosen.flatten()
    expected = flat.argsort(stable=True)
    right = isinstance(order, Tensor) and order.shape == expected.shape and bool((order == expected).all())
    message = "choices[order] must go up from expert 0, and choices of the same expert keep their order"
    if isinstance(order, Tensor) and order.shape == (TOKENS,):
        message = "every token has two choices: sort both"
    elif not right and isinstance(order, Tensor) and order.shape == expected.shape:
        picked = flat[order]
        if bool((picked[1:] <= picked[:-1]).all()):
            message = (
                "the choices are sorted from the last expert to the first: ranks receive their rows in ascending order"
            )
    work.check("order", right, expected.tolist(), order.tolist() if isinstance(order, Tensor) else order, message)
    wanted = flat.bincount(minlength=EXPERTS + 1).tolist()
    more = work.module.route(chosen, EXPERTS + 1)[1].tolist()
    work.check(
        "counts",
        more == wanted,
        f"{wanted} choices of {EXPERTS + 1} experts, the last of which nobody has chosen",
        more,
        "an expert without tokens has the count 0: pass minlength to bincount",
    )


def explain_output(found: Tensor, rank: int) -> str:
    """Compares an output with what usual mistakes give."""
    tokens, gates = (tensor.detach() for tensor in arguments(rank))
    chosen = choices(rank, False)
    modules = [build_expert(number) for number in range(EXPERTS)]
    outputs = torch.stack([module(tokens).detach() for module in modules], dim=1)
    picked = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
    rows = (picked * gates[..., None]).flatten(0, 1)
    unsorted = torch.zeros_like(tokens).index_add(
        0, torch.arange(2 * TOKENS) // 2, rows[chosen.flatten().argsort(stable=True)]
    )
    candidates = {
        "the gates are not applied: weight the output of each choice by its gate": picked.sum(1),
        "what returns is in the order of route: add row i to the token of the choice order[i]": unsorted,
        "the gates are applied twice": (picked * gates[..., None].square()).sum(1),
        "the first choice alone arrives: every token has two": picked[:, 0] * gates[:, :1],
        "the second choice of a token replaces the first: add them, with index_add": picked[:, 1] * gates[:, 1:],
    }
    for message, candidate in candidates.items():
        if not differs(found, candidate):
            return message
    right = (picked * gates[..., None]).sum(1)
    part = [(token, i) for token in range(TOKENS) for i in range(2)]
    weighted = {(token, i): picked[token, i] * gates[token, i] for token, i in part}
    wrong = int((found - right).abs().amax(1).gt(TOLERANCE).sum())
    if all(
        min(float((found[t] - right[t] + weighted.get((t, i), found[t] * 0)).abs().max()) for i in (0, 1, 2)) < 1e-9
        for t in range(TOKENS)
    ):
        return f"a choice of {wrong} tokens is dropped: there is no capacity here, every chosen row travels"
    return "is every received row processed by its own expert? Rows come sorted by source rank, then by expert"


def check_results(work: Work, records: list[DispatchRecord]) -> None:
    for rank, (record, expected) in enumerate(zip(records, reference(False), strict=True)):
        if differs(record.balanced.output, expected.output):
            where = f"rank {rank} has other outputs"
            message = explain_output(record.balanced.output, rank)
            work.check("outputs", False, "those of one process within 1e-10", where, message)
            break
    else:
        work.check("outputs", True, "those of one process within 1e-10", "equal on both ranks", "")
    check_gradients(work, records)
    wrong = [
        rank
        for rank, (record, expected) in enumerate(zip(records, reference(True), strict=True))
        if differs(record.uneven.output, expected.output)
    ]
    work.check(
        "uneven load",
        not wrong,
        "the same if all tokens choose experts 3 and 1",
        f"ranks {wrong} have other outputs" if wrong else "equal on both ranks",
        "two experts get all rows and two get none: sizes come from the counts, and nothing is dropped or padded",
    )


def check_gradients(work: Work, records: list[DispatchRecord]) -> None:
    names = {"tokens": "the tokens", "gates": "the gates", "experts": "the experts"}
    wrong = []
    for record, expected in zip(records, reference(False), strict=True):
        pairs = {
            "tokens": [(record.balanced.tokens, expected.tokens)],
            "gates": [(record.balanced.gates, expected.gates)],
            "experts": list(zip(record.balanced.experts, expected.experts, strict=True)),
        }
        wrong += [name for name, both in pairs.items() if any(differs(*pair) for pair in both)]
    bad = [text for name, text in names.items() if name in wrong]
    zero = not any(bool(record.balanced.tokens.any()) for record in records)
    message = "an operation without a gradient is on the way: dist.all_to_all_single has none, and detach cuts it"
    work.check(
        "gradients",
        not bad,
        "those of one process within 1e-10",
        f"those of {', '.join(bad)} differ{', and tokens have none' if zero else ''}" if bad else "equal",
        message if zero else "the gradient takes the way of the forward pass back: does the output differ already?",
    )


def check_messages(work: Work, records: list[DispatchRecord]) -> None:
    kinds = {event.kind for record in records for event in record.events} - {"wait", "mark"}
    work.check(
        "collectives",
        kinds == {"all_to_all"},
        "all-to-alls alone",
        describe_kinds(records[0].events),
        "an all-gather brings every token to every rank, also those that no expert there has asked for",
    )
    sent = [sum(event.bytes for event in record.events if event.kind == "all_to_all") for record in records]
    counts = EXPERTS * 8
    received = [
        int(sum((choices(s, False) // (EXPERTS // RANKS) == rank).sum() for s in range(RANKS))) for rank in range(RANKS)
    ]
    wanted = [counts + (2 * TOKENS + rows) * ROW for rows in received]
    work.check(
        "bytes",
        sent == wanted,
        f"{wanted} bytes enter the all-to-alls of the ranks: {EXPERTS} counts, one row per choice there and back",
        sent,
        "only the chosen rows travel, once in each direction, and one exchange of counts",
    )


def grade(work: Work) -> None:
    check_route(work)
    records = work.ranks("2 ranks return", exercise, RANKS, work.module)
    check_results(work, records)
    check_messages(work, records)
