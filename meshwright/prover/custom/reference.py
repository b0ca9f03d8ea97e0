"""The reference of a run of a custom model: every step computed by the plain module from the state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.config import Batch, RunConfig
from meshwright.base.dtypes import rounds_weights
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_fsdp
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.parallel.float8 import find_linear_layers
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.prover.custom.model_facts import ModelFacts
from meshwright.prover.custom.subject import plain_objective
from meshwright.prover.oracle.float8 import rounded_layers
from meshwright.prover.oracle.optimizer import ReferenceState
from meshwright.prover.oracle.plain_model import BatchDivision, PlainModel
from meshwright.prover.oracle.sampler import Sampler
from meshwright.prover.oracle.steps import TrainedModel, train_steps
from meshwright.prover.reference import Reference, ReferenceTask
from meshwright.prover.trace import StepTrace, Trace
from meshwright.prover.tracer import AssembledTrace

BY_ROUNDING = ("fp64", "fp32", "fp16", "bf16", "fp8")
"""The precisions, those that round least first."""


@dataclass(frozen=True)
class CustomReferenceTask(ReferenceTask):
    """A proof run of a custom model. The module belongs to the process that computes the reference."""

    custom: CustomModel = field(kw_only=True)
    facts: ModelFacts = field(kw_only=True)
    accumulation: int = 1
    """micro-batches per step"""
    buffers: list[dict[str, Tensor]] = field(default_factory=lambda: [{}, {}])
    """the buffers before and after the last exact step; empty: those of the module"""

    @property
    def follows_run(self) -> bool:
        return True

    def on_layout(self, config: RunConfig, batch: Batch) -> CustomReferenceTask:
        """A collate function may pad, so that what a rank reads depends on how the layout divides the batch."""
        return replace(self, config=config, replicas=batch.replicas, accumulation=batch.accumulation)

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.custom.objective_spec().block_patterns

    @property
    def tied(self) -> Mapping[str, tuple[str, ...]]:
        return self.facts.tied

    @property
    def noise_precision(self) -> str:
        """The lowest precision that the run computes in: the configured one, or a lower one inside the module."""
        return max(super().noise_precision, self.facts.inner_precision, key=BY_ROUNDING.index)

    def train(
        self,
        config: RunConfig | None = None,
        steps: range | None = None,
        *,
        start: ReferenceState | None = None,
        permute: bool | None = None,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        low_precision_units: bool = False,
        nonfinite_steps: frozenset[int] | None = None,
        **_options: Any,
    ) -> Trace:
        """Trains the plain module. `permute` is None for the exact values, of which the buffers are kept."""
        config, exact = config or self.config, self.facts.exact_dtype
        model_dtype = autocast if low_precision_units and autocast is not None else dtype or exact
        passes = BatchDivision(self.facts.divided, self.replicas, self.accumulation, bool(permute))
        low = None if low_precision_units else autocast
        model = PlainModel(plain_objective(self.custom), passes, config.seed, model_dtype, low, rounds_weights(config))
        model.load(self.buffers[permute is None])
        before = {name: buffer.detach().clone() for name, buffer in model.buffers().items()}
        with rounded_layers(self.float8_layers() if autocast is not None else []):
            trace = train_steps(
                config,
                model,
                start or ReferenceState({name: p.detach().clone() for name, p in model.parameters().items()}),
                self.read,
                [len(part) for part in self.sources],
                steps=range(self.first_step, config.steps) if steps is None else steps,
                dtype=dtype or exact,
                nonfinite_steps=self.nonfinite_steps if nonfinite_steps is None else nonfinite_steps,
                blocks=self.blocks,
            )
        if permute is None:
            self.buffers[:] = [before, {name: buffer.detach().clone() for name, buffer in model.buffers().items()}]
        return trace

    def float8_layers(self) -> list[nn.Linear]:
        """The layers of the plain module that the run computes in float8."""
        if not self.config.precision.float8:
            return []
        degree = Layout.from_config(self.config.layout).tensor
        return find_linear_layers(nn.ModuleDict({"model": self.custom.module}), self.custom.objective_spec(), degree)

    def follow(self, measured: AssembledTrace) -> Reference:
        """A run that continues starts with the buffers that it restored."""
        if measured.trace.steps[0].step > 0:
            self.buffers[:] = [measured.buffers[0], measured.buffers[0]]
        return super().follow(measured)

    def rounding(self) -> dict[str, Any]:
        compute = self.config.precision.compute
        if compute == "fp64":
            return {}
        options: dict[str, Any] = {"dtype": torch.float32}
        if compute == "fp32":
            return options
        low = torch.bfloat16 if compute == "bf16" else torch.float16
        sharded = uses_fsdp(Layout.from_config(self.config.layout)) and not rounds_weights(self.config)
        return options | {"autocast": low, "low_precision_units": sharded}

    def read(self, ids: Sequence[int]) -> list[Any]:
        source = ConcatenatedSource(self.sources)
        return [source[sample] for sample in ids]

    def micro_batches(self, step: StepTrace, accumulation: int) -> tuple[TrainedModel, list[Any]]:
        lengths = [len(part) for part in self.sources]
        samples = self.read(Sampler.from_config(self.config, lengths).step(step.step))
        passes = BatchDivision("ranks", self.replicas, accumulation)
        parts = [[samples[row] for row in rows.tolist()] for _, _, rows in passes.cells(len(samples))]
        return PlainModel(
            plain_objective(self.custom), BatchDivision(), self.config.seed, self.facts.exact_dtype
        ), parts
