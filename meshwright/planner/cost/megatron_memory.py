"""Memory of one rank at the points of a step where it may peak, for Megatron and the trainers built on it; torch-free.

| shard | parameters | gradients | optimizer |
|---|---|---|---|
| none | P parameter_bytes | P gradient_bytes | P optimizer_bytes |
| optimizer | P parameter_bytes | P gradient_bytes | P optimizer_bytes / n |
| gradients | P parameter_bytes | P gradient_bytes / n | P optimizer_bytes / n |
| parameters | P parameter_bytes / n, and one layer | P gradient_bytes / n, and one layer | P optimizer_bytes / n |

P is the number of the rank's parameters, n the size of the shard group (data and context ranks); the bytes are those of
the trainer profile. Gradients are in buffers that are allocated once, and so are gradients that are accumulated in a
dtype of their own. Communication buffers are added if there are data-parallel ranks.
"""

from __future__ import annotations

from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.fsdp_memory import StageMemory, StepMemory, TransientMemory
from meshwright.planner.cost.in_flight import SchedulePoint

IS_SHARDED = {"none": (0, 0, 0), "optimizer": (0, 0, 1), "gradients": (0, 1, 1), "parameters": (1, 1, 1)}
"""Whether parameters, gradients and the optimizer state are sharded."""


class MegatronStepMemory(StepMemory):
    """The memory of one pipeline rank with contiguous parameter and gradient buffers."""

    def persistent(self) -> MemoryEstimate:
        trainer, numel = self.trainer, self.dense + self.experts
        parameters, gradients, state = (self.shards if sharded else numel for sharded in IS_SHARDED[self.job.sharding])
        receive_buffers = 2 * self.residual if self.pipelined else 0.0
        data_parallel = self.job.layout.data_degree * self.job.layout.context > 1
        return MemoryEstimate(
            parameters * self.parameter_bytes + numel * trainer.compute_copy_bytes,
            gradients * self.gradient_bytes + numel * trainer.accumulation_bytes,
            state * self.optimizer_bytes,
            communication=receive_buffers + (trainer.bucket_bytes if data_parallel else 0.0),
        )

    def final_gradients(self) -> float:
        return 0.0

    def pipeline_reduction(self) -> TransientMemory:
        return TransientMemory(0.0, 0.0)

    def reductions(self, point: SchedulePoint, stage: StageMemory, saved: float) -> list[TransientMemory]:  # noqa: ARG002
        return []

    def moment(self, point: SchedulePoint, name: str, activations: float, logits: float = 0.0) -> TransientMemory:
        unsharded = communication = 0.0
        if self.job.sharding == "parameters":
            parameters = self.stages[point.stage].parameters
            layer = parameters.block + parameters.block_experts
            ends = (parameters.embedding + parameters.head) * self.compute_bytes
            unsharded = 2 * layer * self.compute_bytes + ends
            in_backward = name in ("last_block", "first_block", "stage_done")
            communication = layer * self.gradient_bytes if in_backward else 0.0
        return TransientMemory(0.0, activations, logits, unsharded, communication)
