"""A scenario on a drawn case, with the planner's estimates of the situation and of every remedy."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.io import format_bytes, format_count
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.cost.trace.data_parallel_plan import reduce_bytes
from meshwright.planner.describe import (
    describe_plan,
    lost_seconds,
    merged_calls,
    recompute_seconds,
    wire_bytes_per_step,
)
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.explain import Explanation, explain
from meshwright.planner.search.explanation.ladder import Bottleneck, find_bottleneck
from meshwright.planner.workload.workload_args import build_workload
from meshwright_practice.interview.drills.quantities import Figure
from meshwright_practice.interview.drills.scenarios import DrillScenario, Remedy, ScenarioCase

MIN_GAIN = 0.8
"""A remedy for lost time helps if at most this share of the lost share of a step remains."""


@dataclass(frozen=True)
class JudgedRemedy:
    remedy: Remedy
    estimate: Estimate
    helps: bool


@dataclass(frozen=True)
class DrillCase:
    """What an answer is compared with."""

    scenario: DrillScenario
    case: ScenarioCase
    now: Estimate
    bottleneck: Bottleneck
    remedies: tuple[JudgedRemedy, ...]
    best: JudgedRemedy
    """the remedy that helps and takes the least time per token"""

    def text(self) -> str:
        """The situation, without the figures that the answer has to find."""
        job, device = self.now.job, self.now.job.cluster.device
        trainer = job.trainer
        lines = [
            self.scenario.question,
            f"  {job.model.name}: {format_count(job.model.parameters)} parameters, {job.model.layers} layers; "
            f"{job.batch.global_:,} samples of {job.sequence:,} tokens per step",
            f"  {job.cluster.size_name}: {job.cluster.device_count:,} devices with {format_bytes(device.memory)}, "
            f"{job.cluster.inter_node.bandwidth / 1e9:.3g} GB/s per device between nodes",
            f"  now: {describe_plan(job)}",
            f"  bytes per parameter: {trainer.parameter_bytes:g} of parameters, {trainer.gradient_bytes:g} of "
            f"gradients, which are reduced with {reduce_bytes(job):g}; AdamW with float32 master weights",
        ]
        return "\n".join(lines)

    def explanation(self) -> Explanation:
        """The planner's own answer in five parts. It compares the best remedy with others of the same batch, because
        steps of different batches are not comparable, and whose plans differ, because it names them by their plans.
        """
        best = self.best.remedy
        others = [
            each.estimate
            for each in self.remedies
            if each.helps and each is not self.best and each.remedy.batch == best.batch and not each.remedy.compress
        ]
        return explain(self.best.estimate, others, (self.now, self.bottleneck))


def draw_case(scenario: DrillScenario, seed: int) -> DrillCase:
    """The case that a seed draws, with its estimates."""
    case = random.Random(f"{scenario.name}-{seed}").choice(scenario.cases)
    return judge_case(scenario, case)


def judge_case(scenario: DrillScenario, case: ScenarioCase) -> DrillCase:
    cluster = resolve_cluster(case.cluster)
    caches: dict[int, CostCache] = {}

    def estimate(batch: int, remedy: Remedy | None) -> Estimate:
        if batch not in caches:
            caches[batch] = CostCache(build_workload(case.model, (), batch, case.sequence), cluster)
        cache, candidate = caches[batch], case.now if remedy is None else remedy.candidate
        return estimate_compressed(cache, candidate) if remedy and remedy.compress else cache.estimate(candidate)

    now = estimate(case.batch, None)
    judged = []
    for remedy in case.remedies:
        after = estimate(remedy.batch or case.batch, remedy)
        judged.append(JudgedRemedy(remedy, after, helps(scenario.limit, now, after)))
    working = [each for each in judged if each.helps]
    best = min(
        working,
        key=lambda each: (each.estimate.seconds / each.estimate.job.tokens_per_step, len(each.remedy.strategies)),
    )
    return DrillCase(scenario, case, now, find_bottleneck(now), tuple(judged), best)


def estimate_compressed(cache: CostCache, candidate: Candidate) -> Estimate:
    """The estimate of a candidate whose DDP has the communication hook bf16_compress."""
    job = candidate_job(cache.work, cache.cluster, candidate)
    job = replace(job, trainer=replace(job.trainer, compresses_gradients=True))
    return cache.corrections.correct_estimate(estimate_step(job, cache.stage_memory(candidate)))


def helps(limit: str, now: Estimate, after: Estimate) -> bool:
    """Whether a remedy removes what limits the job: it fits, and less of the step is lost to the named cause."""
    if not after.fits:
        return False
    if limit in ("memory", "batch"):
        return True
    return lost_seconds(after)[limit] / after.seconds <= MIN_GAIN * lost_seconds(now)[limit] / now.seconds


def problem_figures(case: DrillCase) -> list[Figure]:
    """What is too large now."""
    now, device = case.now, case.now.job.cluster.device
    memory = now.peak_memory
    figures = [Figure("memory needed", memory.total, "bytes"), Figure("live tensors", memory.tensors, "bytes")]
    if not now.fits:
        figures += [
            Figure("memory over the device", memory.total - device.memory, "bytes"),
            Figure("memory needed of the device", memory.total / device.memory, "ratio"),
            Figure("activations", memory.activations + memory.logits, "bytes"),
            Figure("model state", memory.parameters + memory.gradients + memory.optimizer, "bytes"),
        ]
        return figures
    figures = [Figure("step time", now.seconds, "seconds")]
    for name, seconds in lost_seconds(now).items():
        figures += [
            Figure(f"time lost to {name}", seconds, "seconds"),
            Figure(f"share lost to {name}", seconds / now.seconds, "share"),
        ]
    if case.scenario.limit == "batch":
        figures += [
            Figure("memory now", memory.total, "bytes"),
            Figure("activations now", memory.activations + memory.logits, "bytes"),
        ]
    return figures


def communication_figures(estimate: Estimate) -> list[Figure]:
    """What a rank sends per step, the messages of each collective, and their sum: messages differ in size, because the
    units of the embedding and of the head are larger than those of blocks.
    """
    messages: list[Figure] = []
    totals: defaultdict[str, float] = defaultdict(float)
    for call in merged_calls(estimate):
        name = f"{call.axis} {call.collective}"
        messages.append(Figure(f"one {name}", call.message_bytes, "bytes"))
        totals[name] += call.message_bytes * call.calls
    sent = Figure("bytes that a rank sends per step", wire_bytes_per_step(estimate), "bytes")
    return [sent, *(Figure(f"all {name} of a step", total, "bytes") for name, total in totals.items()), *messages]


def price_figures(case: DrillCase, after: Estimate) -> list[Figure]:
    """What the remedy costs, and what remains."""
    now, memory = case.now, after.peak_memory
    figures = [
        Figure("step time", after.seconds, "seconds"),
        Figure("step time against before", after.seconds / now.seconds, "ratio"),
        Figure("memory afterwards", memory.total, "bytes"),
        Figure("free memory", after.job.cluster.device.memory - memory.total, "bytes"),
        Figure("share of the device", memory.total / after.job.cluster.device.memory, "share"),
        Figure("recomputation", recompute_seconds(after), "seconds"),
        Figure("bytes sent per step", wire_bytes_per_step(after), "bytes"),
        Figure("bytes sent against before", wire_bytes_per_step(after) / max(1.0, wire_bytes_per_step(now)), "ratio"),
        Figure("change of the step time", abs(after.seconds / now.seconds - 1), "share"),
        Figure("activations afterwards", memory.activations + memory.logits, "bytes"),
        Figure("batch against before", after.job.batch.global_ / now.job.batch.global_, "ratio"),
    ]
    figures += [
        Figure(f"share of {name}", seconds / after.seconds, "share") for name, seconds in lost_seconds(after).items()
    ]
    return figures
