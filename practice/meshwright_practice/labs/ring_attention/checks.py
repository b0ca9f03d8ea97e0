"""The checks of the lab on ring attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshwright.base.io import format_bytes
from meshwright.testing import World
from meshwright_practice.labs.instruments.live_memory import allocated_bytes
from meshwright_practice.labs.instruments.message_log import (
    MARK,
    MessageEvent,
    MessageLog,
    describe_kinds,
    sent_bytes,
)
from meshwright_practice.labs.work import Work

RANKS, HEADS, LENGTH, SIZE = 4, 2, 16, 4
"""LENGTH is that of a chunk."""
CHUNK = HEADS * LENGTH * SIZE * 8
"""Bytes of the keys of a chunk."""
TOLERANCE = 1e-10


@dataclass(frozen=True)
class AttentionRecord:
    """What one rank has seen."""

    out: Tensor
    events: list[MessageEvent]
    peak: int


def whole_sequence(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, RANKS * LENGTH, SIZE)
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    return q * scale, k, v


def chunk_of(tensor: Tensor, rank: int) -> Tensor:
    return tensor[:, rank * LENGTH : (rank + 1) * LENGTH].contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def exercise(world: World, user: ModuleType) -> AttentionRecord:
    q, k, v = (chunk_of(tensor, world.rank) for tensor in whole_sequence())
    own = user.chunk_attention
    with MessageLog(world.size) as log, allocated_bytes([q, k, v]) as allocated:

        def marked(*args: Any) -> Any:
            log.mark("compute")
            return own(*args)

        vars(user)["chunk_attention"] = marked
        out = user.ring_attention(q, k, v)
    return AttentionRecord(out, log.events, allocated.peak)


def differs(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return True
    return not bool((found - expected).abs().max() <= TOLERANCE)


def is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def check_chunk(work: Work) -> None:
    q, k, v = (chunk_of(tensor, 0) for tensor in whole_sequence())
    with work.attempt("functions return"):
        found = work.module.chunk_attention(q, k, v, causal_mask(LENGTH))
        plain = work.module.chunk_attention(q, k, v, None)
        large = work.module.chunk_attention(*(chunk_of(tensor, 0) for tensor in whole_sequence(scale=2e3)), None)
    right = is_pair(found) and is_pair(plain)
    pairs = [(found, attend(q, k, v, causal_mask(LENGTH))), (plain, attend(q, k, v))] if right else []
    wrong = [i for i in range(2) if any(differs(given[i], expected[i]) for given, expected in pairs)]
    what = {0: "outputs", 1: "log-sum-exps"}
    work.check(
        "chunk",
        right and not wrong,
        "softmax(q k^T / sqrt(head size)) v, and the logarithm of the sum of exp(scores)",
        "as expected" if right and not wrong else f"other {' and '.join(what[i] for i in wrong)}" if right else found,
        "are masked scores -inf, are scores divided by sqrt(head size), and is the log-sum-exp that of these scores?",
    )
    expected = attend(*(chunk_of(tensor, 0) for tensor in whole_sequence(scale=2e3)))
    finite = is_pair(large) and not differs(large[0], expected[0])
    work.check(
        "large scores",
        finite,
        "the same for scores of several thousand",
        "as expected" if finite else "nan or other values",
        "exp overflows above 709: subtract the maximum of the scores, or their log-sum-exp, first",
    )


def check_merge(work: Work) -> None:
    q, k, v = whole_sequence()
    half = RANKS * LENGTH // 2
    parts = (*attend(q, k[:, :half], v[:, :half]), *attend(q, k[:, half:], v[:, half:]))
    out, lse = attend(q, k, v)
    found = work.module.merge(*parts)
    right = is_pair(found) and not differs(found[0], out) and not differs(found[1], lse)
    message = "weight each output by exp(lse of the part - lse of both), and return the log-sum-exp of both"
    if is_pair(found) and not differs(found[0], (parts[0] + parts[2]) / 2):
        message = "this is the mean of the outputs: a part with larger scores has a larger share of the softmax"
    elif is_pair(found) and not differs(found[0], parts[0] + parts[2]):
        message = "this is the sum of the outputs: each is normalized by its own keys, and must be scaled first"
    text = "as expected" if right else "another result"
    work.check("merge", right, "the attention over all keys, and its log-sum-exp", text, message)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    found = work.module.merge(*nothing, out, lse)
    work.check(
        "merge of nothing",
        is_pair(found) and not differs(found[0], out),
        "merging with a set without keys changes nothing",
        "as expected" if is_pair(found) and not differs(found[0], out) else "nan or another result",
        "exp(-inf - lse) is 0, but -inf - (-inf) is nan: use torch.logaddexp",
    )


def explain_attention(found: list[Tensor]) -> str:
    """Compares what came out with what usual mistakes give."""
    q, k, v = whole_sequence()
    everywhere = attend(q, k, v)[0]
    if all(not differs(out, chunk_of(everywhere, rank)) for rank, out in enumerate(found)):
        return "every query looks at the whole sequence: chunks of ranks behind this one are in the future"
    chunks = [[chunk_of(tensor, rank) for tensor in (q, k, v)] for rank in range(RANKS)]
    own = [attend(q_part, k_part, v_part, causal_mask(LENGTH))[0] for q_part, k_part, v_part in chunks]
    if all(not differs(out, expected) for out, expected in zip(found, own, strict=True)):
        return "every rank attends to its own chunk alone: the keys and values of the ranks before it must reach it"
    right = [not differs(out, expected) for out, expected in zip(found, expected_outputs(), strict=True)]
    if all(not differs(out, masked_everywhere(chunks, rank)) for rank, out in enumerate(found)):
        return "the causal mask is for the own chunk only: a query may look at all of the chunks before it"
    if right[0] and not any(right[1:]):
        return (
            "rank 0 is right, and all others are wrong: are the keys and the values of one chunk always used together?"
        )
    if not right[0] and not differs(found[0], attend(*chunks[0])[0]):
        return "rank 0 looks ahead inside its chunk: its own chunk needs the causal mask"
    if right[:2] == [True, True] and not right[-1]:
        return "the last ranks miss chunks: after N - 1 transfers every rank has had every chunk"
    return "after s transfers to the right, rank r has the keys and the values of rank (r - s) % N: are both passed on?"


def masked_everywhere(chunks: list[list[Tensor]], rank: int) -> Tensor:
    """What a rank computes if it applies the causal mask to every chunk."""
    keys, values = (torch.cat([chunk[part] for chunk in chunks[: rank + 1]], dim=1) for part in (1, 2))
    return attend(chunks[rank][0], keys, values, causal_mask(LENGTH).repeat(1, rank + 1))[0]


def expected_outputs() -> list[Tensor]:
    out = attend(*whole_sequence(), causal_mask(RANKS * LENGTH))[0]
    return [chunk_of(out, rank) for rank in range(RANKS)]


def check_ring(work: Work, records: list[AttentionRecord]) -> None:
    found = [record.out for record in records]
    wrong = [rank for rank, out in enumerate(found) if differs(out, expected_outputs()[rank])]
    shown = f"ranks {wrong} have another result" if wrong else "the same on every rank within 1e-10"
    expected = "causal attention over the whole sequence"
    work.check("attention", not wrong, expected, shown, explain_attention(found) if wrong else "")
    kinds = {event.kind for record in records for event in record.events} - {"wait", MARK}
    right = all(
        event.peer == (rank + 1) % RANKS
        for rank, record in enumerate(records)
        for event in record.events
        if event.kind == "send"
    )
    work.check(
        "messages",
        kinds == {"send", "receive"} and right,
        "sends to the right neighbour and receives from the left one, nothing else",
        describe_kinds(records[0].events) + ("" if right else ", not all to the right neighbour"),
        "a collective would bring all keys to every rank at once: pass one chunk per step around the ring",
    )
    ideal = (RANKS - 1) * 2 * CHUNK
    sent = [sent_bytes(record.events) for record in records]
    work.check(
        "bytes",
        all(count == ideal for count in sent),
        f"N - 1 chunks of keys and values per rank: {ideal:,} bytes",
        f"{sent} bytes on the ranks",
        "each rank sends a chunk of keys and values in all steps but the last",
    )
    check_overlap(work, records)
    bound = 10 * CHUNK + 4 * HEADS * LENGTH * LENGTH * 8
    peak = max(record.peak for record in records)
    work.check(
        "memory",
        peak <= bound,
        f"a few chunks: at most {format_bytes(bound)} beside the arguments",
        f"{format_bytes(peak)} at the peak",
        "no more than the chunk at hand and the next one exist at once; the whole sequence never does",
    )


def check_overlap(work: Work, records: list[AttentionRecord]) -> None:
    """On the last rank, which computes in every step, the transfers start before the compute that hides them."""
    kinds = [event.kind for event in records[-1].events]
    first = kinds.index(MARK) if MARK in kinds else -1
    work.check(
        "overlap",
        first > 0 and "send" in kinds[:first] and "receive" in kinds[:first] and "wait" not in kinds[:first],
        "the first transfer starts before the first chunk_attention, and is waited for after it",
        ", ".join("compute" if kind == MARK else kind for kind in kinds[:6]),
        "call isend and irecv, then chunk_attention, then wait: otherwise every transfer delays the compute",
    )


def grade(work: Work) -> None:
    check_chunk(work)
    check_merge(work)
    check_ring(work, work.ranks("4 ranks return", exercise, RANKS, work.module))
