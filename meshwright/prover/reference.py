"""Computes the reference traces and tolerances of proof runs in a process of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.config import RunConfig
from meshwright.data.source import ConcatenatedSource, Source
from meshwright.parallel.world import World
from meshwright.prover.discrepancy import compare_traces
from meshwright.prover.noise import Tolerances
from meshwright.prover.oracle.training import train
from meshwright.prover.trace import Trace

NOISE_SEEDS = 3
"""Seeds over which the rounding noise of a low precision is measured; float64 needs one."""


@dataclass(frozen=True)
class ReferenceTask:
    """A proof run that is computed by the reference."""

    config: RunConfig
    sources: list[Source]
    poisoned: frozenset[int] = field(default_factory=frozenset)
    """Steps whose loss is not finite."""
    pass_samples: int | None = None
    """Samples per forward pass in global order; only a capacity depends on it."""

    def train(self, config: RunConfig | None = None, **options: Any) -> Trace:
        source = ConcatenatedSource(self.sources)
        config = config or self.config
        lengths = [len(part) for part in self.sources]
        steps = range(config.steps)
        options = {"poisoned": self.poisoned, "pass_samples": self.pass_samples} | options
        return train(config, source.__getitem__, lengths, steps=steps, **options)

    def rough_options(self) -> dict[str, Any]:
        """What makes the reference round as the run does."""
        match self.config.precision.compute:
            case "fp64":
                return {"permute": True}
            case "fp32":
                return {"dtype": torch.float32}
            case low:
                return {"dtype": torch.float32, "autocast": torch.bfloat16 if low == "bf16" else torch.float16}

    def run(self) -> tuple[Trace, Tolerances]:
        """The exact trace, and the tolerances that its rounding noise gives."""
        precision = self.config.precision.compute
        exact, repetitions = self.train(), []
        for offset in range(1 if precision == "fp64" else NOISE_SEEDS):
            seeded = replace(self.config, seed=self.config.seed ^ offset)
            right = exact if not offset else self.train(seeded)
            repetitions.append(list(compare_traces(right, self.train(seeded, **self.rough_options()))))
        return exact, Tolerances.from_noise(precision, repetitions)

    def stale_loss(self) -> float:
        """The loss of step 1 if step 0 updates nothing."""
        still = replace(self.config, steps=2, optimizer=replace(self.config.optimizer, lr=0.0))
        return self.train(still, poisoned=frozenset()).steps[1].loss


def compute_references(_world: World, tasks: list[ReferenceTask]) -> list[tuple[Trace, Tolerances]]:
    """Runs in a process of its own: autograd in the launcher would initialize CUDA, which does not survive a fork."""
    return [task.run() for task in tasks]


def compute_stale_loss(_world: World, task: ReferenceTask) -> float:
    return task.stale_loss()
