"""Computes the reference traces and tolerances of proof runs in a process of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.config import IGNORE_INDEX, RunConfig
from meshwright.data.source import ConcatenatedSource, Source
from meshwright.parallel.world import World
from meshwright.prover.compare.discrepancy import compare_traces
from meshwright.prover.compare.noise import Tolerances
from meshwright.prover.oracle.training import Passes, ReferenceModel, train
from meshwright.prover.trace import StepTrace, Trace
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import uses_fsdp

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
    """Samples per forward pass in global order; only a capacity depends on it and on `replicas`."""
    replicas: int = 1
    first_step: int = 0

    def train(self, config: RunConfig | None = None, **options: Any) -> Trace:
        source = ConcatenatedSource(self.sources)

        def read(sample: int) -> tuple[NDArray[Any], NDArray[Any]]:
            tokens, labels = source[sample]
            return tokens, labels

        config = config or self.config
        lengths = [len(part) for part in self.sources]
        steps = range(self.first_step, config.steps)
        options = {
            "poisoned": self.poisoned,
            "pass_samples": self.pass_samples,
            "replicas": self.replicas if self.pass_samples else 1,
        } | options
        return train(config, read, lengths, steps=steps, **options)

    def rough_options(self) -> dict[str, Any]:
        """What makes the reference round as the run does."""
        compute = self.config.precision.compute
        if compute == "fp64":
            return {"permute": True}
        compressed = self.config.ddp.comm_hook == "bf16_compress"
        options = {"dtype": torch.float32, "gradient_dtype": torch.bfloat16 if compressed else None}
        if compute == "fp32":
            return options
        low = torch.bfloat16 if compute == "bf16" else torch.float16
        sharded = uses_fsdp(Layout.from_config(self.config.layout))
        return options | {"autocast": low, "low_precision_units": sharded}

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
        still = replace(self.config, optimizer=replace(self.config.optimizer, lr=0.0))
        return self.train(still, poisoned=frozenset()).steps[1].loss


def compute_references(_world: World, tasks: list[ReferenceTask]) -> list[tuple[Trace, Tolerances]]:
    """Runs in a process of its own: autograd in the launcher would initialize CUDA, which does not survive a fork."""
    return [task.run() for task in tasks]


def compute_stale_loss(_world: World, task: ReferenceTask) -> float:
    return task.stale_loss()


def fit_sample_weights(
    _world: World, task: ReferenceTask, step: StepTrace, before: dict[str, Tensor], names: list[str], accumulation: int
) -> tuple[Tensor, float]:
    """The gradients of a step as a weighted sum of those of its micro-batches: the weights, (data-parallel rank,
    micro-batch), and the relative error of the sum. All weights of a correct step are 1.
    """
    cells = task.replicas * accumulation
    micro = len(step.inputs) // cells
    model = ReferenceModel(task.config, None, Passes(micro))
    parameters = {name: value.double() for name, value in before.items()}
    valid = max(1, int((step.labels != IGNORE_INDEX).sum()))
    columns = []
    for tokens, labels in zip(step.inputs.split(micro), step.labels.split(micro), strict=True):
        _, gradients, _ = model.gradient(parameters, tokens.long(), labels.long(), 1.0)
        share = int((labels != IGNORE_INDEX).sum()) / valid
        columns.append(share * torch.cat([gradients[name].flatten() for name in names]))
    parts, found = torch.stack(columns, 1), torch.cat([step.gradients[name].double().flatten() for name in names])
    weights = torch.linalg.lstsq(parts, found[:, None], driver="gelsd").solution
    error = float((parts @ weights - found[:, None]).norm() / found.norm().clamp(min=1e-300))
    return weights.view(task.replicas, accumulation), error
