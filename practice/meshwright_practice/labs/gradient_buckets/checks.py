"""The checks of the lab on gradient buckets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.io import format_bytes
from meshwright.testing import World
from meshwright_practice.labs.instruments.live_memory import allocated_bytes
from meshwright_practice.labs.instruments.message_log import MARK, WAIT, MessageEvent, MessageLog, describe_kinds
from meshwright_practice.labs.work import Work

WIDTH, LAYERS, RANKS = 8, 4, 2
BUCKET_BYTES = 2 * (WIDTH + 1) * WIDTH * 8
"""Gradients of two layers in float64."""
SAME_LAYERS = ((None, None), (None, None), (1, 1))
"""Step by step, the layer that each rank leaves out."""
DIFFERENT_LAYERS = ((1, 3),)
"""The two layers are in different buckets of equal size."""
BACKWARD_ENDED = "backward ended"
TOLERANCE = 1e-12


class SideBranch(nn.Module):
    """Linear layers, one of which can be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class BucketRecord:
    """What one rank has seen: the gradients of all steps, their right values, and the events of the first step."""

    gradients: list[list[Tensor | None]]
    local: list[list[Tensor | None]]
    means: list[list[Tensor]]
    events: list[MessageEvent]
    kept: int


def build_model() -> SideBranch:
    torch.manual_seed(0)
    return SideBranch()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def local_gradients(model: SideBranch, rank: int, step: int, skipped: int | None) -> list[Tensor | None]:
    """The gradients of one rank by themselves."""
    other = copy.deepcopy(model)
    other.zero_grad()
    other(batch(rank, step), skipped).square().sum().backward()
    return [parameter.grad for parameter in other.parameters()]


def exercise(world: World, module: ModuleType, skipped: Sequence[tuple[int | None, ...]]) -> BucketRecord:
    model, plain = build_model(), build_model()
    parameters = list(model.parameters())
    log = MessageLog(world.size)
    for parameter in parameters:  # before the user's hooks, which react to the gradient
        parameter.register_post_accumulate_grad_hook(lambda _: log.mark("gradient"))
    state: Any = module.attach_hooks(module.make_buckets(parameters, BUCKET_BYTES))
    gradients, kept, events = [], 0, []
    for step, layers in enumerate(skipped):
        model.zero_grad()
        with log, allocated_bytes(parameters, sum(p.nbytes for p in parameters)) as allocated:
            model(batch(world.rank, step), layers[world.rank]).square().sum().backward()
            log.mark(BACKWARD_ENDED)
            module.finish(state)
        gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])
        if step == 0:
            kept, events = allocated.at_end, log.events.copy()
    every = [
        [local_gradients(plain, rank, step, layer) for rank, layer in enumerate(layers)]
        for step, layers in enumerate(skipped)
    ]
    means = [[mean(parts) for parts in zip(*of_step, strict=True)] for of_step in every]
    return BucketRecord(gradients, [of_step[world.rank] for of_step in every], means, events, kept)


def mean(parts: Sequence[Tensor | None]) -> Tensor:
    tensors = [part for part in parts if part is not None]
    return torch.stack(tensors).sum(0) / len(parts) if tensors else torch.zeros(())


def close(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and found.shape == expected.shape and bool((found - expected).abs().max() < TOLERANCE)


def explain_gradients(record: BucketRecord, step: int) -> str:
    """Says what the gradients are instead of the means."""
    found, means, local = record.gradients[step], record.means[step], record.local[step]
    wrong = [i for i, expected in enumerate(means) if expected.dim() and not close(found[i], expected)]
    if all(close(found[i], RANKS * means[i]) for i in wrong):
        return "these are sums: divide by the number of ranks"
    if len(wrong) == len(means) and all(close(found[i], own) for i, own in enumerate(local) if own is not None):
        return "these are the gradients of this rank alone: finish copies the flat tensors back into .grad"
    if all(own is not None and close(found[i], own) for i in wrong for own in [local[i]]):
        return "some gradients are those of this rank alone: every bucket is reduced, also the last and the incomplete"
    return "a bucket starts when its last gradient is ready, not before, and each slice goes back to its own parameter"


def check_gradients(work: Work, name: str, records: list[BucketRecord], step: int, message: str = "") -> bool:
    for rank, record in enumerate(records):
        pairs = list(zip(record.gradients[step], record.means[step], strict=True))
        wrong = [index for index, (found, right) in enumerate(pairs) if right.dim() and not close(found, right)]
        if wrong:
            found = (
                f"rank {rank}: {len(wrong)} of {len(pairs)} gradients differ, the first is that of parameter {wrong[0]}"
            )
            expected = f"the mean over {RANKS} ranks in every .grad"
            work.check(name, False, expected, found, message or explain_gradients(record, step))
            return False
    work.check(name, True, f"the mean over {RANKS} ranks in every .grad", "it is there", "")
    return True


def check_buckets(work: Work) -> int:
    """Grades `make_buckets` in this process, and returns the number of buckets."""
    model = build_model()
    parameters = list(model.parameters())
    names = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = work.module.make_buckets(parameters, BUCKET_BYTES)
    found = [[names.get(id(parameter), -1) for parameter in bucket] for bucket in buckets]
    flat = [index for bucket in found for index in bucket]
    reverse = list(reversed(range(len(parameters))))
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    if sorted(flat) != sorted(reverse):
        message = "every parameter is in exactly one bucket, also those of the last bucket, which may not be full"
    elif flat != reverse:
        message = "start with the last parameter: backward reaches it first"
    elif max(sizes) > BUCKET_BYTES:
        message = "begin a new bucket before the next parameter would exceed bucket_bytes"
    else:
        message = "fill a bucket while the next parameter fits"
    expected = [[7, 6, 5, 4], [3, 2, 1, 0]]
    if found == expected:
        single = [len(bucket) for bucket in work.module.make_buckets(parameters, 1)]
        if single != [1] * len(parameters):
            found, expected = [single], [[1] * len(parameters)]
            message = "a parameter that is larger than bucket_bytes gets a bucket of its own, and no bucket is empty"
    work.require(
        "buckets",
        found == expected,
        f"parameters {expected} with at most {format_bytes(BUCKET_BYTES)} per bucket",
        f"parameters {found}",
        message,
    )
    return len(buckets)


def check_order(work: Work, record: BucketRecord, buckets: int) -> None:
    """Checks when the all-reduces start, and when the first wait is."""
    events = record.events
    ended = next(i for i, event in enumerate(events) if event.text == BACKWARD_ENDED)
    ready = [i for i, event in enumerate(events[:ended]) if event.kind == MARK]
    starts = [i for i, event in enumerate(events) if event.kind == "all_reduce"]
    early = [i for i in starts if i < ready[-1]]
    in_backward = [i for i in starts if i < ended]
    work.check(
        "overlap",
        len(early) >= buckets - 1 and len(in_backward) == len(starts),
        f"{buckets - 1} of {buckets} all-reduces start before the last gradient is ready, and all before backward ends",
        f"{len(early)} before the last gradient, {len(in_backward)} before backward ends, of {len(starts)}",
        "start the all-reduce in the hook of the last gradient of a bucket",
    )
    waits = [i for i, event in enumerate(events[:ended]) if event.kind == WAIT]
    work.check(
        "asynchronous",
        not waits,
        "no wait before backward ends",
        f"{len(waits)} waits during backward" if waits else "no wait",
        "pass async_op=True, keep the work handle, and wait in finish: a wait in a hook stops backward",
    )
    messages = [event for event in events if event.kind not in (MARK, WAIT)]
    size, total = sum(event.bytes for event in messages), sum(right.nbytes for right in record.means[0])
    work.check(
        "messages",
        len(messages) == len(starts) == buckets and size == total,
        f"{buckets} all-reduces, one per bucket, of {total:,} bytes together",
        f"{describe_kinds(events)} of {size:,} bytes together",
        "each bucket is one flat tensor, and each gradient is in one bucket",
    )


def grade(work: Work) -> None:
    buckets = work.call("buckets", check_buckets, work)
    records = work.ranks("2 ranks return", exercise, RANKS, work.module, SAME_LAYERS)
    if check_gradients(work, "gradients", records, 0):
        again = "the first step is right: finish must set the counts back, so that the hooks start again"
        check_gradients(work, "second step", records, 1, again)
    check_order(work, records[0], buckets)
    gradients = sum(right.nbytes for right in records[0].means[0])
    work.check(
        "memory",
        records[0].kept <= gradients,
        f"after finish, {format_bytes(gradients)}: only the gradients",
        format_bytes(records[0].kept),
        "forget the flat tensors and work handles in finish: they double the memory of gradients",
    )
    if work.passed("second step"):
        never = (
            "the bucket of the unused parameter never fills: finish starts its all-reduce, with zeros for the gradient"
        )
        if check_gradients(work, "unused parameter", records, 2, never):
            check_different_layers(work)


def check_different_layers(work: Work) -> None:
    """Ranks of their own: other ranks may wait for ever for a bucket that one of them never starts."""
    records = work.ranks("different layers return", exercise, RANKS, work.module, DIFFERENT_LAYERS)
    pairs = [pair for record in records for pair in zip(record.gradients[0], record.means[0], strict=True)]
    missing = all(found is None for found, right in pairs if not close(found, right))
    message = (
        "a parameter that this rank did not use has no .grad, and the other rank used it: both need the mean"
        if missing
        else "a collective has no name: start the buckets in their order on every rank, also if a later one is ready "
        "first"
    )
    check_gradients(work, "different layers", records, 0, message)
