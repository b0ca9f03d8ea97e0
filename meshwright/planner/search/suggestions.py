"""What to change where nothing fits, or nothing divides: found by trying, each change by itself; torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.errors import ConfigError
from meshwright.io import format_bytes
from meshwright.planner.describe import describe_plan, memory_by_class
from meshwright.planner.hardware.cluster import NODE_TYPES, Cluster
from meshwright.planner.search.search import CostCache, min_memory_candidate
from meshwright.planner.search.search_space import divisors
from meshwright.planner.workload.workload import Workload

DEGREES = ("layout.tensor", "layout.pipeline", "layout.context", "layout.expert")
MAX_DEVICE_FACTOR = 4096
"""More devices than so many times those that there are are not tried."""


def infeasible_error(desk: CostCache) -> ConfigError:
    """The refusal of a workload that no layout takes: what is in the way, and the smallest changes that would do."""
    work, cluster = desk.work, desk.cluster
    least = min_memory_candidate(desk)
    name = f"{work.model.name} on {cluster.device_count:,} {cluster.device.name}"
    if least is None:
        return ConfigError(
            f"{name}: {describe_indivisible(work, cluster)}",
            f"allowed: {', or '.join(divisible_alternatives(work, cluster))}",
        )
    held = desk.peak_memory(least)
    worst, most = max(memory_by_class(held).items(), key=lambda row: row[1])
    shape = describe_plan(desk.time(least).job)
    what = (
        f"{name} does not fit: the lightest plan ({shape}) takes {format_bytes(held.total)} of "
        f"{format_bytes(cluster.device.memory)}, {worst} alone {format_bytes(most)}"
    )
    return ConfigError(what, f"allowed: {', or '.join(feasible_changes(work, cluster)) or 'a smaller model'}")


def fits(work: Workload, cluster: Cluster) -> bool:
    desk = CostCache(work, cluster)
    least = min_memory_candidate(desk)
    return least is not None and desk.fits(least)


def feasible_changes(work: Workload, cluster: Cluster) -> list[str]:
    """Each that makes it fit, by itself: without a pin, more devices, larger ones, shorter sequences, fewer bytes."""
    found = []
    for key, value in work.pinned.items():
        free = replace(work, pinned={other: kept for other, kept in work.pinned.items() if other != key})
        if fits(free, cluster):
            found.append(f"without --{key}={value}")
    if devices := min_devices(work, cluster):
        found.append(f"{devices:,} devices")
    for device in sorted((node.device for node in NODE_TYPES.values()), key=lambda device: device.memory):
        if device.memory > cluster.device.memory and fits(work, replace(cluster, device=device)):
            found.append(f"as many {device.name} of {format_bytes(device.memory)}")
            break
    sequence = work.sequence // 2
    while sequence >= 128:
        if fits(work.with_size(sequence=sequence), cluster):
            found.append(f"--sequence {sequence}")
            break
        sequence //= 2
    if work.precision in ("fp32", "fp64") and fits(with_precision(work, "bf16"), cluster):
        found.append("--precision bf16")
    return found


def min_devices(work: Workload, cluster: Cluster) -> int:
    """The fewest that take it: doubled until it fits, then halved back to whole nodes; 0 where more do not help."""
    times = 2
    while times <= MAX_DEVICE_FACTOR and not fits(work, cluster.with_devices(cluster.device_count * times)):
        times *= 2
    if times > MAX_DEVICE_FACTOR:
        return 0
    unit = cluster.devices_per_node if cluster.nodes > 1 or cluster.device_count == cluster.devices_per_node else 1
    low, high = cluster.device_count * times // 2, cluster.device_count * times
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high):
            break
        low, high = (low, middle) if fits(work, cluster.with_devices(middle)) else (middle, high)
    return high


def with_precision(work: Workload, precision: str) -> Workload:
    compute: Any = precision
    base = work.base_config and replace(
        work.base_config, precision=replace(work.base_config.precision, compute=compute)
    )
    return replace(work, precision=precision, base_config=base)


def describe_indivisible(work: Workload, cluster: Cluster) -> str:
    """The first rule that a pin breaks, or that the batch has no samples for so many devices."""
    model, pinned = work.model, work.pinned
    tensor, context = int(pinned.get("layout.tensor", 1)), int(pinned.get("layout.context", 1))
    pipeline, expert = int(pinned.get("layout.pipeline", 1)), int(pinned.get("layout.expert", 1))
    unit = tensor * context * pipeline
    if cluster.device_count % unit:
        factors = f"tensor {tensor} x context {context} x pipeline {pipeline}"
        return f"{cluster.device_count:,} devices do not divide over {unit:,} ({factors})"
    for name, number in (
        ("heads", model.heads),
        ("kv heads", model.kv_heads),
        ("inner columns", model.ffn),
        ("tokens", work.sequence),
    ):
        if number % tensor:
            return f"layout.tensor = {tensor} does not divide {number:,} {name}"
    if pipeline > model.layers:
        return f"layout.pipeline = {pipeline} has more stages than {model.layers} layers"
    if work.sequence % (context * tensor):
        return f"layout.context = {context} does not divide {work.sequence:,} tokens"
    if expert > 1 and (not model.experts or model.experts % expert):
        return f"layout.expert = {expert} does not divide {model.experts} experts"
    told = ", ".join(f"--{key}={value}" for key, value in pinned.items())
    return f"no layout takes a batch of {work.global_batch:,}" + (f" with {told}" if told else "")


def divisible_alternatives(work: Workload, cluster: Cluster) -> list[str]:
    """What divides: without a pin or with another value of it, another batch, other numbers of devices."""
    found = []
    for key, value in work.pinned.items():
        free = replace(work, pinned={other: kept for other, kept in work.pinned.items() if other != key})
        if min_memory_candidate(CostCache(free, cluster)) is not None:
            found.append(f"without --{key}={value}")
            found += alternative_degrees(work, cluster, key)
    below = next((n for n in range(cluster.device_count - 1, 0, -1) if divides(work, cluster, n)), 0)
    above = next(
        (n for n in range(cluster.device_count + 1, 2 * cluster.device_count + 1) if divides(work, cluster, n)), 0
    )
    if near := [f"{n:,}" for n in (below, above) if n]:
        found.append(f"{' or '.join(near)} devices")
    if not found and work.pinned and min_memory_candidate(CostCache(replace(work, pinned={}), cluster)) is not None:
        found.append("without these words")
    return found or [f"--batch of a multiple of {divisors(cluster.device_count)[-1]:,}"]


def alternative_degrees(work: Workload, cluster: Cluster, key: str) -> list[str]:
    """Values of a pinned degree that divide, the nearest few."""
    if key not in DEGREES:
        return []
    near = sorted(divisors(cluster.device_count), key=lambda degree: abs(degree - int(work.pinned[key])))[:8]
    fits = [
        degree
        for degree in near
        if min_memory_candidate(CostCache(replace(work, pinned={**work.pinned, key: degree}), cluster)) is not None
    ]
    return [f"{key} = {', '.join(map(str, sorted(fits)))}"] if fits else []


def divides(work: Workload, cluster: Cluster, devices: int) -> bool:
    """Whole copies are tried alone: what they divide over, other layouts do, too."""
    unit = 1
    for key in ("layout.tensor", "layout.context", "layout.pipeline"):
        unit *= int(work.pinned.get(key, 1))
    if devices % unit or work.global_batch % (devices // unit):
        return False
    return min_memory_candidate(CostCache(work, cluster.with_devices(devices))) is not None
