"""Wire bytes: what one rank sends for a collective, by the ring count. Torch-free."""

from __future__ import annotations

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "other", "reduce_scatter", "send")
"""`other` is a collective that nobody here has a count for; it is taken to send its message once."""


def wire_bytes(collective: str, message: int, ranks: int) -> int:
    """The message is the whole tensor, before it is scattered or after it is gathered, in bytes.

    A ring moves it in n parts. A rank of a gather or a scatter passes on n - 1 of them; an all-reduce is a scatter and
    a gather; in an exchange a rank keeps one part of n; a broadcast passes everything on once, part by part.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"no ring count for {collective!r}; there is one for {', '.join(COLLECTIVES)}")
    if ranks == 1 or collective == "barrier":
        return 0
    if collective == "all_reduce":
        return 2 * (ranks - 1) * message // ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * message // ranks
    return message
