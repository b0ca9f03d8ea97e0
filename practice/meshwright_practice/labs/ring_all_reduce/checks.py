"""The checks of the lab on ring all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from meshwright.base.io import format_bytes
from meshwright.testing import World
from meshwright_practice.labs.instruments.live_memory import allocated_bytes
from meshwright_practice.labs.instruments.message_log import (
    MessageEvent,
    MessageLog,
    count_kinds,
    describe_kinds,
    sent_bytes,
)
from meshwright_practice.labs.work import Work

LENGTH, UNEVEN = 4096, 1003
"""Elements of the tensors: a multiple of the number of ranks, and not."""


@dataclass(frozen=True)
class RingRecord:
    """What one rank has seen."""

    complete: object
    reduced: Tensor
    gathered: list[Tensor]
    even: Tensor
    uneven: Tensor
    bits: Tensor
    events: list[MessageEvent]
    peak: int


def values(rank: int, length: int) -> Tensor:
    """Integers as float64, whose sums are exact in any order; those of their thirds are not."""
    return torch.arange(length, dtype=torch.float64) * (rank + 1) + 10 * rank


def exercise(world: World, module: ModuleType) -> RingRecord:
    chunks = [chunk.clone() for chunk in values(world.rank, LENGTH).chunk(world.size)]
    complete = module.ring_reduce_scatter(chunks)
    reduced = chunks[complete % world.size].clone() if isinstance(complete, int) else torch.empty(0)
    given = [torch.full((3,), float(rank), dtype=torch.float64) for rank in range(world.size)]
    mine = (world.rank + 1) % world.size
    gathered = [chunk if rank == mine else torch.full_like(chunk, -1.0) for rank, chunk in enumerate(given)]
    module.ring_all_gather(gathered, mine)
    even, uneven = values(world.rank, LENGTH), values(world.rank, UNEVEN)
    with MessageLog(world.size) as log, allocated_bytes([even], LENGTH * 8) as allocated:
        module.ring_all_reduce(even)
    module.ring_all_reduce(uneven)
    bits = values(world.rank, UNEVEN) / 3
    module.ring_all_reduce(bits)
    return RingRecord(complete, reduced, gathered, even, uneven, bits, log.events, allocated.peak)


def wrong_at(found: Tensor, expected: Tensor) -> str:
    """Describes the first element that differs."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} of shape {list(found.shape)}"
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return "as expected"
    first = int(wrong[0])
    what = f"{len(wrong)} of {len(found)} elements differ; element {first} is {found[first]:g}"
    return f"{what} instead of {expected[first]:g}"


def check_sum(work: Work, name: str, records: list[RingRecord], uneven: bool = False) -> bool:
    ranks, length = len(records), UNEVEN if uneven else LENGTH
    total = torch.stack([values(rank, length) for rank in range(ranks)]).sum(0)
    tensors = [record.uneven if uneven else record.even for record in records]
    bad = next((rank for rank, tensor in enumerate(tensors) if wrong_at(tensor, total) != "as expected"), None)
    if bad is None:
        work.check(name, True, f"the sum of {ranks} ranks", "the sum on every rank", "")
        return True
    found = f"rank {bad}: {wrong_at(tensors[bad], total)}"
    work.check(name, False, f"the sum of {ranks} ranks", found, explain_sum(tensors[bad], total, bad, ranks))
    return False


def explain_sum(found: Tensor, total: Tensor, rank: int, ranks: int) -> str:
    """Says what the tensor is instead of the sum."""
    if found.shape != total.shape or found.dtype != total.dtype:
        return "the tensor keeps its shape and its dtype"
    right = [
        bool(torch.equal(*pair)) for pair in zip(found.tensor_split(ranks), total.tensor_split(ranks), strict=True)
    ]
    if torch.equal(found, values(rank, len(total))):
        return "the tensor is as it was: write the sum into it instead of into another one"
    if torch.equal(found * ranks, total):
        return "this is the mean: the sum is not divided by the number of ranks"
    if int((found != total).sum()) < ranks:
        return "the last elements are not summed: the length need not be a multiple of the number of ranks"
    if any(right):
        return f"only chunk {right.index(True)} is the sum: the all-gather must bring the others"
    return "reduce-scatter the chunks, then all-gather them, with dist.get_world_size() ranks"


def check_parts(work: Work, records: list[RingRecord]) -> None:
    """The two halves by themselves."""
    ranks = len(records)
    complete = [record.complete for record in records]
    permutation = all(isinstance(index, int) for index in complete) and {*complete} == {*range(ranks)}
    total = torch.stack([values(rank, LENGTH) for rank in range(ranks)]).sum(0).chunk(ranks)
    sums = permutation and all(torch.equal(record.reduced, total[int(str(record.complete))]) for record in records)
    work.check(
        "reduce-scatter",
        sums,
        "each rank returns the index of another chunk, which is the sum",
        f"indices {complete}; {'sums' if sums else 'these chunks are not the sums'}",
        "rank r sends chunk (r - s) % N in step s, and adds what it receives to chunk (r - s - 1) % N; N - 1 steps",
    )
    expected = [float(rank) for rank in range(ranks)]
    gathered = [[float(chunk[0]) for chunk in record.gathered] for record in records]
    bad = next((rank for rank, found in enumerate(gathered) if found != expected), None)
    work.check(
        "all-gather",
        bad is None,
        f"chunks {expected} on every rank",
        "they are there" if bad is None else f"rank {bad} has {gathered[bad]}",
        "start with the chunk `complete`; in every step, pass on the chunk that has just arrived",
    )


def check_messages(work: Work, records: list[RingRecord]) -> None:
    ranks, size = len(records), LENGTH * 8
    ideal = 2 * (ranks - 1) * size // ranks
    sent = [sent_bytes(record.events) for record in records]
    work.check(
        "bytes",
        all(count == ideal for count in sent),
        f"every rank sends 2 (N - 1) / N of {format_bytes(size)}: {ideal:,} bytes",
        f"{', '.join(f'{count:,}' for count in sent)} bytes on ranks 0 to {ranks - 1}",
        "each message should be one chunk, and only the right neighbour gets it",
    )
    wanted = {"send": 2 * (ranks - 1), "receive": 2 * (ranks - 1)}
    to_right = all(
        event.peer == (rank + 1) % ranks
        for rank, record in enumerate(records)
        for event in record.events
        if event.kind == "send"
    )
    odd = next((record for record in records if count_kinds(record.events) != wanted), None)
    events = odd.events if odd is not None else records[0].events
    peers = "" if to_right else ", not all to the right neighbour"
    work.check(
        "messages",
        odd is None and to_right,
        f"{wanted['send']} sends to the right neighbour and as many receives per rank",
        describe_kinds(events) + peers,
        "the ring uses only send and receive, N - 1 steps for each half",
    )


def grade(work: Work) -> None:
    records = work.ranks("4 ranks return", exercise, 4, work.module)
    check_parts(work, records)
    summed = check_sum(work, "sum", records) and check_sum(work, "any length", records, uneven=True)
    if summed:
        check_bits(work, records)
    check_messages(work, records)
    peak, chunk = max(record.peak for record in records), LENGTH * 8 // 4
    work.check(
        "memory",
        peak <= 3 * chunk,
        f"at most three chunks ({format_bytes(3 * chunk)}) beside the tensor",
        f"{format_bytes(peak)} at the peak",
        "chunks are views of the tensor; a receive needs one buffer of one chunk",
    )
    if summed:
        check_sum(work, "sum on 3 ranks", work.ranks("3 ranks return", exercise, 3, work.module))


def check_bits(work: Work, records: list[RingRecord]) -> None:
    differing = [rank for rank, record in enumerate(records) if not torch.equal(record.bits, records[0].bits)]
    work.check(
        "same bits on all ranks",
        not differing,
        "bitwise the same sum on all ranks",
        f"ranks {differing} differ from rank 0 in the last bits" if differing else "the same bits",
        "sum every chunk on one path around the ring and copy the result: replicas that sum by themselves drift apart",
    )
