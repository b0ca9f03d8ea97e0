"""What activation checkpointing computes again before backward, besides pointwise kernels; torch-free.

| activation checkpointing | matrix products with weights | attention or scan |
|---|---|---|
| none | | |
| selective, matmuls | | |
| selective, alternate matmuls | half of them | |
| selective, all but scores | | all |
| selective, all but pointwise | | |
| alternate: full in every other block | half of them | half of them |
| full | all | all |

A trainer that does not save the queries, keys and values of latent attention projects them up again in every mode; full
activation checkpointing computes them once, as part of the block.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.workload.trainer_profile import TrainerProfile


class Recomputed(NamedTuple):
    """Fractions of the forward pass of a block."""

    matmuls: float
    """of matrix products with weights"""
    mixer: float
    """of attention or the scan"""


RECOMPUTED = {"none": Recomputed(0.0, 0.0), "alternate": Recomputed(0.5, 0.5), "full": Recomputed(1.0, 1.0)}
"""Mode -> what it computes again."""
SELECTIVE = {
    "matmuls": Recomputed(0.0, 0.0),
    "alternate_matmuls": Recomputed(0.5, 0.0),
    "all_but_scores": Recomputed(0.0, 1.0),
    "all_but_pointwise": Recomputed(0.0, 0.0),
}
"""Policy of the selective mode -> what it computes again."""


def recomputed_parts(mode: str, trainer: TrainerProfile) -> Recomputed:
    """What a mode of activation checkpointing computes again."""
    return SELECTIVE[trainer.selective_policy] if mode == "selective" else RECOMPUTED[mode]


def recomputes_latent_projections(mode: str, trainer: TrainerProfile) -> bool:
    """Whether latent attention is projected up again beside what the mode computes again."""
    return trainer.recomputes_latent_projections and mode in ("none", "selective")
