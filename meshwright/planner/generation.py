"""How long a group takes to generate, and how many generators a learner needs; torch-free.

A generator has the whole model on one device of the same kind as the learner's. The time of a pass is that of a
roofline: max(FLOP / rate, bytes / bandwidth), with 2 FLOP per active parameter and token, and with the weights and the
keys and values of every row as the bytes (Pope et al. 2022, arXiv:2211.05102, section 2; Williams et al. 2009).

    prefill   the prompt once:                  max(2 N P / F, W / B) + L
    decode    one token of every row, C times:  max(2 N g / F, (W + g K (P + C / 2)) / B) + L
    scoring   all rows, in the learner's shape: max(2 N g S / F, W / B) + L, twice with a reference policy

N active parameters, W bytes of the weights, K bytes of keys and values per token, g rollouts of a group, P prompt
tokens, C completion tokens, S tokens of a row, F FLOP/s that large products sustain, B bytes/s that kernels reach, L
seconds in which the kernels of a pass are launched. P and C are the most that the config permits: shorter completions
are faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from meshwright.base.config.rl import RLConfig
from meshwright.base.dtypes import PRECISION_BYTES
from meshwright.planner.cost.terms.kernel_time import LAUNCH_GAP, kernel_rate
from meshwright.planner.workload.planned_job import PlannedJob

KERNELS_PER_BLOCK = 24
"""Kernels of a block in an eager decoding pass: two norms, seven products, rotation, cache, attention, activation."""
MAX_WAIT = 0.05
"""The share of its time that a learner may wait for rollouts."""


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of one group on one device."""

    prefill: float
    decode: float
    """of all tokens"""
    scoring: float
    bound: str
    """what limits decoding: memory bandwidth, FLOP or launches"""

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode + self.scoring


@dataclass(frozen=True)
class GeneratorPlan:
    """How many generators a learner needs, in theory."""

    group: GenerationTime
    groups_per_step: int
    learner_seconds: float
    """of a step, without waiting for rollouts"""
    staleness: int
    generators: int
    """those that the config starts"""
    wait: float
    """share of its time that the learner waits with them"""
    synchronous: int | None
    """generators with which the learner waits less than MAX_WAIT if staleness is 0; None: no number is enough"""
    synchronous_wait: float
    """share with one generator per group, the smallest if staleness is 0"""
    asynchronous: int
    """the same if rollouts may be one step old or more"""
    asynchronous_staleness: int
    """the staleness that lets so many generators work at the same time"""
    fits: bool
    """whether the weights fit into the memory of a device"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"group_seconds": self.group.seconds, "max_wait": MAX_WAIT}

    def sentences(self) -> list[str]:
        """The answer in words."""
        share = f"{MAX_WAIT:.0%}"
        if self.synchronous is None:
            synchronous = (
                f"no number of generators brings the wait below {share}; with one per group ({self.groups_per_step}) "
                f"the learner waits {self.synchronous_wait:.0%} of its time"
            )
        else:
            synchronous = f"{count(self.synchronous)} for a wait below {share}"
        return [
            f"synchronous (rl.staleness = 0): learner and generators alternate, and each waits for the other: "
            f"{synchronous}",
            f"asynchronous (rl.staleness = {self.asynchronous_staleness}): generators work while the learner trains: "
            f"{count(self.asynchronous)} for a wait below {share}",
            f"as configured (rl.staleness = {self.staleness}, {count(self.generators)}): the learner waits "
            f"{self.wait:.0%} of its time",
            *(() if self.fits else ("the weights do not fit into the memory of one device, which a generator needs",)),
        ]


def count(generators: int) -> str:
    return f"{generators:,} generator" + ("s" if generators != 1 else "")


def generation_time(job: PlannedJob, rl: RLConfig) -> GenerationTime:
    """The time of a group on one device of the job's cluster."""
    model, device = job.model, job.cluster.device
    rate = kernel_rate(device, job.precision, job.trainer)
    element = PRECISION_BYTES[job.precision]
    weights = model.parameters * element
    prompt = max(1, job.sequence - rl.completion_tokens)
    flops_per_token = 2.0 * model.active_parameters
    keys_and_values = 2.0 * model.layers * model.kv_heads * model.head_dim * element
    launches = model.layers * KERNELS_PER_BLOCK * (job.cluster.launch_seconds or LAUNCH_GAP)
    prefill = max(flops_per_token * prompt / rate.flops, weights / rate.bandwidth) + launches
    compute = flops_per_token * rl.group_size / rate.flops
    context = prompt + rl.completion_tokens / 2
    memory = (weights + rl.group_size * keys_and_values * context) / rate.bandwidth
    limits = {"memory bandwidth": memory, "FLOP": compute, "launches": launches}
    decode = rl.completion_tokens * (max(compute, memory) + launches)
    passes = 2 if rl.kl else 1
    scored = flops_per_token * rl.group_size * job.sequence / rate.flops
    scoring = passes * (max(scored, weights / rate.bandwidth) + launches)
    return GenerationTime(prefill, decode, scoring, max(limits, key=lambda name: limits[name]))


def plan_generators(job: PlannedJob, rl: RLConfig, learner_seconds: float) -> GeneratorPlan:
    """How many generators keep the learner of a job busy, whose step takes so many seconds."""
    group = generation_time(job, rl)
    groups = max(1, job.batch.global_ // rl.group_size)
    ranks = range(1, groups + 1)
    enough = (n for n in ranks if wait_share(group.seconds, groups, learner_seconds, n, 0) < MAX_WAIT)
    asynchronous = needed_asynchronous(group.seconds, groups, learner_seconds)
    weights = job.model.parameters * PRECISION_BYTES[job.precision]
    return GeneratorPlan(
        group,
        groups,
        learner_seconds,
        rl.staleness,
        rl.generators,
        wait_share(group.seconds, groups, learner_seconds, max(1, rl.generators), rl.staleness),
        next(enough, None),
        wait_share(group.seconds, groups, learner_seconds, groups, 0),
        asynchronous,
        max(1, ceil(asynchronous / groups)),
        weights < job.cluster.device.memory,
    )


def wait_share(group_seconds: float, groups: int, learner_seconds: float, generators: int, staleness: int) -> float:
    """The share of its time that a learner waits.

    Synchronous: generators begin when a step has ended, and every one generates whole groups. Asynchronous: they work
    while the learner trains, on the groups that the staleness bound permits, which limits how many work at a time.
    """
    if staleness == 0:
        wait = ceil(groups / generators) * group_seconds
        return wait / (wait + learner_seconds)
    working = min(generators, staleness * groups)
    return max(0.0, 1 - learner_seconds * working / (groups * group_seconds))


def needed_asynchronous(group_seconds: float, groups: int, learner_seconds: float) -> int:
    """The fewest generators whose groups per second are at least 1 - MAX_WAIT of those that the learner trains."""
    return max(1, ceil((1 - MAX_WAIT) * groups * group_seconds / learner_seconds - 1e-9))
