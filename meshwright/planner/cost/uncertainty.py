"""The 80 % interval of a predicted step time, and the assumption that contributes most to its width.

Each phase of a step is predicted with some relative accuracy. The uncertainty of a phase is its share of the step time
multiplied by that accuracy. Uncertainties are independent, so their squares add up. The accuracies are chosen such
that 80 % of the published runs lie inside their intervals (docs/planner.md prints the measured coverage).
"""

from __future__ import annotations

from math import exp, hypot

from meshwright.planner.workload.planned_job import PlannedJob

KERNELS = "kernel efficiency"
ACCURACY = {
    "forward": (0.085, KERNELS),
    "backward": (0.085, KERNELS),
    "recompute": (0.085, KERNELS),
    "contention": (0.5, "slowdown of computation by overlapped collectives"),
    "tensor": (0.3, "cost and overlap of tensor-parallel communication"),
    "context": (0.4, "overlap of context-parallel communication"),
    "expert": (0.5, "expert load balance and token dispatch"),
    "pipeline": (0.4, "overlap of pipeline sends"),
    "bubble": (0.15, "pipeline bubble"),
    "shard": (0.35, "overlap of FSDP all-gathers and reduce-scatters"),
    "replicate": (0.35, "overlap of gradient all-reduces"),
    "update": (0.5, "speed of the optimizer update"),
    "other": (0.5, "data loading, gradient clipping and logging"),
}
"""By phase: the relative accuracy, and the name of what is uncertain."""
MIN_UNCERTAINTY = 0.03
"""The difference between two runs of the same job."""
HOST_BOUND = (0.2, "launch time of kernels on the host")
"""The accuracy of computation that waits for the host, which differs between machines of the same GPU."""
NEARLY_FULL = (0.09, "allocator retries, because memory is nearly full")


def interval(job: PlannedJob, phases: dict[str, float], nearly_full: bool) -> tuple[float, float, str]:
    """Returns the ends of the 80 % interval in seconds, and the largest source of uncertainty."""
    total = sum(phases.values())
    sources: dict[str, float] = {}
    for phase, seconds in phases.items():
        accuracy, source = ACCURACY[phase]
        if source == KERNELS:
            accuracy = job.trainer.kernel_accuracy
            if is_host_bound(job, phases) and accuracy < HOST_BOUND[0]:
                accuracy, source = HOST_BOUND
        sources[source] = sources.get(source, 0.0) + accuracy * seconds / total
    if job.model.experts:
        sources["efficiency of grouped matmuls and routing"] = 0.2
    if nearly_full:
        sources[NEARLY_FULL[1]] = NEARLY_FULL[0]
    width = hypot(MIN_UNCERTAINTY, *sources.values())
    return total * exp(-width), total * exp(width), max(sources, key=lambda source: sources[source])


def is_host_bound(job: PlannedJob, phases: dict[str, float]) -> bool:
    """Whether the forward pass of a layer takes hardly longer than the host needs to launch its kernels."""
    passes = job.batch.accumulation * max(1, job.model.layers // job.layout.pipeline)
    return phases.get("forward", 0.0) <= 1.6 * passes * job.trainer.layer_launch_seconds
