"""How long a step takes, by what the time is spent on."""

from __future__ import annotations

from meshwright.plan.figures import Call, Estimate, Memory
from meshwright.plan.job import Job


def timed(job: Job, stages: list[Memory]) -> Estimate:
    model, layout = job.model, job.layout
    per_token = 6 * (model.active_parameters - model.vocab * model.width * (0 if model.tied else 1))
    per_token += 3 * model.layers * model.attended * job.sequence
    flops = per_token * job.tokens
    again = 4 / 3 if job.recompute == "full" else 1
    rate = 0.5 * job.cluster.device.peak["bf16"] * layout.ranks
    compute = flops * again / rate
    bubble = compute * (layout.pipeline - 1) / job.batch.accumulation / job.stages
    over = layout.data_degree * layout.context
    message = 4 * model.parameters / layout.tensor / layout.pipeline
    seconds = 2 * message / job.cluster.between.bandwidth if over > 1 else 0.0
    calls = [Call("shard", "reduce_scatter", message, 1, over, "between", seconds, seconds / 2)]
    phases = {"forward": compute / 3, "backward": compute * 2 / 3, "bubble": bubble, "sync": seconds / 2}
    total = sum(phases.values())
    return Estimate(job, stages, phases, calls, total * 0.8, total * 1.25, "kernels' efficiency", flops, flops * again)
