"""What one rank holds at each moment of a step of Megatron and those built on it; torch-free.

| sharded | parameters | gradients | optimizer |
|---|---|---|---|
| nothing | weights P | gradients P | state P |
| optimizer | weights P | gradients P | state P / n |
| gradients | weights P | gradients P / n | state P / n |
| parameters | weights P / n, one layer whole | gradients P / n, one layer whole | state P / n |

P is what the rank has of the parameters, n the ranks that share them (data and context), and the words are bytes of the
stack. Gradients lie in buffers that are made once; so do the sums over micro-batches, where they have a precision of
their own. Buffers in which both travel come on top where ranks share anything.
"""

from __future__ import annotations

from meshwright.planner.cost.estimate import MemoryEstimate
from meshwright.planner.cost.fsdp_memory import StageMemory, StepMemory, TransientMemory
from meshwright.planner.cost.in_flight import SchedulePoint

CUT = {"none": (0, 0, 0), "optimizer": (0, 0, 1), "gradients": (0, 1, 1), "parameters": (1, 1, 1)}
"""Whether parameters, gradients and the optimizer are divided."""


class MegatronStepMemory(StepMemory):
    def persistent(self) -> MemoryEstimate:
        stack, numbers = self.stack, self.dense + self.bank
        weights, gradients, state = (self.shards if cut else numbers for cut in CUT[self.job.sharding])
        received = 2 * self.stream if self.piped else 0.0
        shares = self.job.layout.data_degree * self.job.layout.context > 1
        return MemoryEstimate(
            weights * self.number + numbers * stack.compute_copy_bytes,
            gradients * self.gradient + numbers * stack.accumulation_bytes,
            state * self.state,
            communication=received + (stack.bucket_bytes if shares else 0.0),
        )

    def left(self) -> float:
        return 0.0

    def end(self) -> TransientMemory:
        return TransientMemory(0.0, 0.0)

    def meetings(self, instant: SchedulePoint, stage: StageMemory, kept: float) -> list[TransientMemory]:  # noqa: ARG002
        return []

    def moment(self, instant: SchedulePoint, when: str, activations: float, logits: float = 0.0) -> TransientMemory:
        gathered = travelling = 0.0
        if self.job.sharding == "parameters":
            has = self.stages[instant.stage].has
            layer = has.block + has.block_experts
            gathered = 2 * layer * self.compute + (has.embedding + has.head) * self.compute
            travelling = layer * self.gradient if when in ("last", "first", "through") else 0.0
        return TransientMemory(0.0, activations, logits, gathered, travelling)
