"""Collectives in one table: the wire bytes of each in the ring algorithm and its torch operators. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One kind of collective.

    A ring of n ranks divides a message into n chunks. In one pass over the ring a rank sends n - 1 of them, so
    (n - 1) / n of the message. The message is the full tensor: before it is scattered, or after it is gathered.
    """

    name: str
    ring_passes: int | None
    """passes over the ring; None: the message is sent once as a whole, whatever the number of ranks"""
    operators: tuple[str, ...] = ()
    """prefixes of torch's operator names in c10d and its functional variants, without a leading underscore"""


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", 2, ("allreduce", "all_reduce")),  # a reduce-scatter and an all-gather
        Collective("all_gather", 1, ("allgather", "all_gather_into_tensor")),
        Collective("reduce_scatter", 1, ("reduce_scatter",)),
        Collective("all_to_all", 1, ("alltoall", "all_to_all_single", "shard_dim_alltoall")),
        Collective("broadcast", None, ("broadcast",)),
        Collective("send", None, ("send", "isend")),
        Collective("barrier", 0, ("barrier", "monitored_barrier")),
        Collective("other", None),  # a collective without a byte count: its message counts once
    )
}


def wire_fraction(name: str, ranks: int) -> tuple[int, int]:
    """The bytes that one rank sends per byte of message, as (numerator, denominator)."""
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; expected one of {', '.join(sorted(COLLECTIVES))}")
    passes = COLLECTIVES[name].ring_passes
    if ranks == 1:
        return 0, 1
    return (1, 1) if passes is None else (passes * (ranks - 1), ranks)


def wire_bytes(name: str, message_bytes: int, ranks: int) -> int:
    """The bytes that one rank sends for one collective, rounded down."""
    numerator, denominator = wire_fraction(name, ranks)
    return numerator * message_bytes // denominator


def find_collective(operator: str) -> str | None:
    """The collective of a torch operator name (without a leading underscore), or None if no entry matches."""
    for collective in COLLECTIVES.values():
        if operator.startswith(collective.operators):
            return collective.name
    return None
