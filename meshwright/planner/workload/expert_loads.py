"""How uneven the measured load of experts is; torch-free.

Imbalance is the load of the busiest rank as a multiple of the mean. Benchmarks that force a balanced load have 1.0.
Without measured loads it is a stated factor; with them it follows from the tokens that chose each expert, which a run
of Meshwright records for every block (event `experts`). All ranks wait for the busiest one in every MoE layer, so its
matmuls, its token permutation, its messages and its activations are multiplied by the imbalance.
"""

from __future__ import annotations

from collections.abc import Sequence


def rank_imbalance(loads: Sequence[Sequence[float]], expert_ranks: int) -> float:
    """Returns the imbalance of measured loads: one row per block with the tokens of each expert. A rank has consecutive
    experts; the mean over blocks counts, because each block waits for its own busiest rank.
    """
    factors = []
    for row in loads:
        per_rank = len(row) // expert_ranks
        if not per_rank or sum(row) <= 0:
            continue
        by_rank = [sum(row[rank * per_rank : (rank + 1) * per_rank]) for rank in range(expert_ranks)]
        factors.append(max(by_rank) * expert_ranks / sum(by_rank))
    return sum(factors) / len(factors) if factors else 1.0
