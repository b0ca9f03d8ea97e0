"""Settings beside the layout, each priced by itself: what the plan would gain or pay with another value; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import is_compiled
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search_space import CHECKPOINT_MODES
from meshwright.planner.search.trainer_rules import trainer_rules
from meshwright.planner.workload.workload import Workload

MIN_TIME_CHANGE, MIN_MEMORY_CHANGE = 0.01, 0.01
"""Changes of step time below this fraction, and of memory below this fraction of the device's, are not worth a line."""


@dataclass(frozen=True)
class SettingChange:
    """The plan with one setting changed."""

    name: str
    option: str
    """the option that changes it; empty if the trainer has its own name for it"""
    time_change: float
    """relative change of the step time; negative is faster"""
    memory_change: float
    """change of peak memory in bytes"""
    fits: bool
    """whether the changed plan leaves the headroom free"""


def price_settings(cache: CostCache, chosen: Estimate) -> list[SettingChange]:
    """Returns the changes that are worth a line, those that save time first."""
    candidate = Candidate.from_job(chosen.job)
    base = cache.estimate(candidate)
    changes = []
    for name, option, work, changed in variants(cache, chosen, candidate):
        other = CostCache(work, cache.cluster)
        if other.is_unsupported(changed):
            continue
        plan = other.estimate(changed)
        time_change = plan.seconds / base.seconds - 1
        memory_change = plan.peak_memory.total - base.peak_memory.total
        small = abs(memory_change) < MIN_MEMORY_CHANGE * cache.cluster.device.memory
        useless = changed.offload and not candidate.offload and memory_change > 0  # its weights are in float32
        if (abs(time_change) >= MIN_TIME_CHANGE or not small) and not useless:
            fits = plan.peak_memory.total <= cache.memory_limit
            changes.append(SettingChange(name, option, time_change, memory_change, fits))
    return sorted(changes, key=lambda change: change.time_change)


def variants(
    cache: CostCache, chosen: Estimate, candidate: Candidate
) -> Iterator[tuple[str, str, Workload, Candidate]]:
    """Yields (name, option, workload, candidate) of the plan with one setting changed."""
    work, device, own = cache.work, cache.cluster.device, cache.work.trainer is None
    if own and not device.is_cpu:
        compiled = is_compiled(chosen.job)
        name = "without torch.compile (eager)" if compiled else "with torch.compile"
        yield name, f"--compile.enabled={str(not compiled).lower()}", work, candidate._replace(compile=not compiled)
    rates = device.peak_flops
    if rates.get("fp8", 0.0) > rates["bf16"] and chosen.job.precision == "bf16":
        changed = replace(work, precision="fp8") if work.base_config is None else with_precision(work, float8=True)
        yield "float8 matmuls in blocks", "--precision.float8=true" if own else "", changed, candidate
    if work.base_config is not None and chosen.job.precision == "bf16" and not chosen.job.trainer.residual_bytes:
        changed = with_precision(work, residual="fp32")
        yield "float32 residual stream", "--precision.residual=fp32", changed, candidate
    for mode in CHECKPOINT_MODES:
        if mode != candidate.activation_checkpoint and mode in trainer_rules(work.trainer_name).checkpoint_modes:
            option = f"--activation_checkpoint.mode={mode}" if own else ""
            name = f"{mode} activation checkpointing" if mode != "none" else "no activation checkpointing"
            yield name, option, work, candidate._replace(activation_checkpoint=mode)
    if not device.is_cpu:
        name = "optimizer state on the device" if candidate.offload else "optimizer state in host memory"
        option = f"--optimizer.cpu_offload={str(not candidate.offload).lower()}" if own else ""
        yield name, option, work, candidate._replace(offload=not candidate.offload)


def with_precision(work: Workload, **fields: Any) -> Workload:
    config = work.base_config
    assert config is not None
    return replace(work, base_config=replace(config, precision=replace(config.precision, **fields)))
