"""Whether it fits: bytes of each rank of a pipeline at the peak of its step, by class."""

from __future__ import annotations

from meshwright.plan.figures import Memory
from meshwright.plan.job import Job


def memory(job: Job) -> list[Memory]:
    """By rank of the pipeline."""
    model, layout, stack = job.model, job.layout, job.stack
    over = layout.shard * layout.context if layout.shard > 1 else 1
    found = []
    for place in range(layout.pipeline):
        held = model.parameters / layout.tensor / layout.pipeline
        cut = {
            "none": (1, 1, 1),
            "optimizer": (1, 1, over),
            "gradients": (1, over, over),
            "parameters": (over, over, over),
        }
        weights, gradients, state = cut[job.sharding]
        live = min(job.batch.accumulation, layout.pipeline - place)
        each = job.micro_tokens * model.width / layout.tensor * (2 if job.recompute == "full" else 34)
        found.append(
            Memory(
                held * stack.weights / weights,
                held * stack.gradients / gradients,
                held * stack.state / state,
                live * each * model.layers / layout.pipeline,
                logits=6 * job.micro_tokens * model.vocab / layout.tensor if place == layout.pipeline - 1 else 0,
                context=1e9,
            )
        )
    return found
