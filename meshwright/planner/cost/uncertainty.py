"""How far a prediction may be wrong, and which assumption most of that comes from.

Every part of a step is known to some accuracy: kernels of a shape, messages on a link, what waits for what. Its doubt
is its share of the step times that accuracy; doubts are independent, so their squares add up. The accuracies were set
such that four of five published runs lie inside their intervals (docs/planner.md prints how many do).
"""

from __future__ import annotations

from math import exp, hypot

from meshwright.planner.workload.planned_job import PlannedJob

COMPUTING = "how near its kernels come to the device's rate"
ACCURACY = {
    "forward": (0.085, COMPUTING),
    "backward": (0.085, COMPUTING),
    "recompute": (0.085, COMPUTING),
    "contention": (0.5, "how much collectives slow computing beside them"),
    "tensor": (0.3, "what messages between matrices cost, and how much of that is hidden"),
    "context": (0.4, "how much of the messages between pieces of sequences is hidden"),
    "expert": (0.5, "how evenly tokens spread over experts, and how they get there"),
    "pipeline": (0.4, "how much of the messages between stages is hidden"),
    "bubble": (0.15, "how long stages wait for each other"),
    "shard": (0.35, "how much of gathering and scattering is hidden"),
    "replicate": (0.35, "how much of summing gradients is hidden"),
    "update": (0.5, "how fast the optimizer goes through its state"),
    "other": (0.5, "data, clipping and logging"),
}
MIN_UNCERTAINTY = 0.03
"""Two runs of the same thing differ by as much."""
UNSTATED = (0.2, "what is recomputed, which the record does not say")
CRAMPED = (0.12, "whether the allocator finds room without waiting: memory is nearly full")


def interval(
    job: PlannedJob, phases: dict[str, float], cramped: bool, unstated: bool = False
) -> tuple[float, float, str]:
    """Seconds between which a step lies in four of five cases, and where most of the doubt is from."""
    total = sum(phases.values())
    doubts: dict[str, float] = {}
    for phase, seconds in phases.items():
        accuracy, reason = ACCURACY[phase]
        doubts[reason] = doubts.get(reason, 0.0) + accuracy * seconds / total
    if job.model.experts:
        doubts["how well grouped products and routing run"] = 0.1
    for applies, (accuracy, reason) in ((unstated, UNSTATED), (cramped, CRAMPED)):
        if applies:
            doubts[reason] = accuracy
    width = hypot(MIN_UNCERTAINTY, *doubts.values())
    return total * exp(-width), total * exp(width), max(doubts, key=lambda reason: doubts[reason])
