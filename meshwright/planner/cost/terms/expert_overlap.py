"""How much of the communication of experts computation hides; torch-free."""

from __future__ import annotations


def exposed_all_to_all(seconds: float, overlap: float, other_compute: float) -> float:
    """Returns the part of an all-to-all that is not hidden. `overlap` is the fraction that the trainer issues while
    another micro-batch computes (DualPipe, Megatron's combined 1F1B), which hides at most `other_compute` seconds.
    """
    return max(0.0, seconds - min(overlap * seconds, other_compute))
