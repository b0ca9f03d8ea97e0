"""The choice among plans: headroom, the risk of running out of memory, ties, and families of similar plans; torch-free.

Step time and memory are predictions. A plan that is predicted to use 98 % of a device runs out of memory in one of
several runs, so plans leave `Workload.headroom` of the memory free, and among the others the plan with the smallest
expected step time is chosen:

    expected = step time x (1 + RETRY_SLOWDOWN x risk of running out of memory)

The risk is that of a normal error of the memory estimate, whose spread `MEMORY_ACCURACY` states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erfc, log, sqrt

from meshwright.base.io import format_percent
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.workload.planned_job import PlannedJob

TIE_TOLERANCE = 0.01
"""Plans of one layout, or of one family, whose step times differ by at most this fraction count as equally fast."""
CHOICE_TOLERANCE = 0.03
"""The same for the first plan of the list: two layouts are not compared more accurately than that, so that the simplest
of them is chosen."""
MEMORY_ACCURACY = {"meshwright": 0.05, "other": 0.1}
"""Half of the 80 % interval of predicted memory, relative: Meshwright's layouts are within 5 % of the memory tracker's
(docs/planner.md), and 80 % of the published runs of other trainers are within 10 %."""
Z_80 = 1.2816
"""Standard deviations of a normal distribution on each side of its mean that hold 80 %."""
AXIS_COMPLEXITY = {"replicate": 1, "shard": 1, "pipeline": 4, "context": 4, "tensor": 4, "expert": 4}
"""What an axis adds to the complexity of a plan. Model parallelism is never simpler than FSDP alone: it changes how the
model is computed."""
SHARDING_COMPLEXITY = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 2}
"""What a sharding adds. ZeRO-2 and ZeRO-3 are FSDP2 with one flag, `reshard_after_forward`, and equally simple."""
RETRY_SLOWDOWN = 1 / 3
"""What a run that ran out of memory loses: it goes on with full activation checkpointing, which repeats the forward
pass, a third of the computation."""


def memory_accuracy(job: PlannedJob) -> float:
    """Returns half of the relative 80 % interval of predicted memory."""
    return MEMORY_ACCURACY["meshwright" if job.trainer.name.startswith("meshwright") else "other"]


def memory_risk(plan: Estimate) -> float:
    """Returns the probability that a plan needs more memory than the device has."""
    spread = memory_accuracy(plan.job) / Z_80 * plan.peak_memory.total
    margin = plan.job.cluster.device.memory - plan.peak_memory.total
    return erfc(margin / spread / sqrt(2)) / 2


def expected_seconds(plan: Estimate) -> float:
    """Returns the step time, with the loss of running out of memory weighted by its risk."""
    return plan.seconds * (1 + RETRY_SLOWDOWN * memory_risk(plan))


def complexity(plan: Estimate) -> int:
    """Counts the parallel axes and techniques of a plan; a simpler plan wins a tie.

    DDP is the simplest on several devices, then come ZeRO-1, FSDP with either of its two shardings, and model
    parallelism; every further axis adds to it.
    """
    job = plan.job
    axes = sum(AXIS_COMPLEXITY[axis] for axis in job.layout.active_axes)
    techniques = (job.activation_checkpoint != "none") + (job.stages_per_rank > 1) + job.offload
    return axes + SHARDING_COMPLEXITY[job.sharding] + techniques


def preference(plan: Estimate) -> tuple[int, int, float]:
    """The sort key of plans of one layout: the fastest, then the simplest of tied plans, then the least memory."""
    return round(log(expected_seconds(plan)) / TIE_TOLERANCE), complexity(plan), plan.peak_memory.total


def rank_estimates(plans: Iterable[Estimate]) -> list[Estimate]:
    """Sorts by expected step time, except that the simplest plan within `CHOICE_TOLERANCE` of the best comes first."""
    ranked = sorted(plans, key=lambda plan: (expected_seconds(plan), complexity(plan), plan.peak_memory.total))
    tied = [plan for plan in ranked if expected_seconds(plan) <= (1 + CHOICE_TOLERANCE) * expected_seconds(ranked[0])]
    first = min(tied, key=lambda plan: (complexity(plan), expected_seconds(plan)), default=None)
    return [first, *(plan for plan in ranked if plan is not first)] if first else []


def why_first(plans: Sequence[Estimate]) -> str:
    """Says why the first of a list of plans comes before the fastest one; empty if no other is faster by 0.1 %."""
    first = plans[0]
    position, fastest = min(enumerate(plans, 1), key=lambda row: row[1].seconds)
    slower = first.seconds / fastest.seconds - 1
    if slower < 1e-3:
        return ""
    comparison = f"Plan 1 is {format_percent(slower)} slower than plan {position}"
    if complexity(first) < complexity(fastest):
        limit = f"{CHOICE_TOLERANCE:.0%}"
        return f"{comparison} and simpler: of the plans within {limit} of the best, the simplest comes first."
    risks = f"{format_percent(memory_risk(first))} and not {format_percent(memory_risk(fastest))}"
    return f"{comparison}, with a risk of {risks} that it does not fit."


def family(plan: PlannedJob | Candidate) -> tuple[object, ...]:
    """Returns what plans of one family share: the axes in use, the sharding and the activation checkpointing.

    Replicas of shard groups are no family of their own.
    """
    layout = plan.layout
    axes = tuple(axis for axis in layout.active_axes if axis != "replicate" or layout.shard == 1)
    return axes, plan.sharding, plan.activation_checkpoint, plan.offload


@dataclass(frozen=True)
class PlanFamily:
    """The plans of one family, the best one first."""

    plans: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        return self.plans[0]

    @property
    def similar(self) -> int:
        """The number of other plans within the tie tolerance of the best one."""
        limit = (1 + TIE_TOLERANCE) * self.best.seconds
        return sum(plan.seconds <= limit for plan in self.plans[1:])


def plan_families(ranked: Iterable[Estimate]) -> list[PlanFamily]:
    """Groups ranked plans into families, in the order of their best plans."""
    members: dict[tuple[object, ...], list[Estimate]] = {}
    for plan in ranked:
        members.setdefault(family(plan.job), []).append(plan)
    return [PlanFamily(tuple(plans)) for plans in members.values()]
