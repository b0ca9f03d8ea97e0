"""Suggestions for a workload that does not fit or does not divide: each is found by trying one change by itself."""

from __future__ import annotations

from dataclasses import replace
from math import floor
from typing import Any

from meshwright.base.hardware.cluster import NODE_TYPES, Cluster, Device
from meshwright.base.io import format_bytes, format_percent
from meshwright.base.models.architecture import Architecture
from meshwright.errors import ConfigError
from meshwright.planner.describe import describe_plan, memory_by_class, memory_label
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.degree_limits import min_memory_candidate
from meshwright.planner.search.search_space import SearchSpace, divisors
from meshwright.planner.workload.workload import Workload, count_samples

DEGREE_KEYS = ("layout.tensor", "layout.pipeline", "layout.context", "layout.expert")
MAX_DEVICE_FACTOR = 256
"""The largest multiple of the cluster's devices that is tried."""


def smallest_candidate(cache: CostCache) -> Candidate | None:
    """Returns the supported candidate with the least memory, with optimizer state in host memory where that helps."""
    space = SearchSpace(max_tensor_degree=cache.cluster.device_count)
    spaces = [space] if cache.cluster.device.is_cpu else [space, replace(space, offload=True)]
    candidates = [min_memory_candidate(cache, each) for each in spaces]
    return min(filter(None, candidates), key=lambda candidate: cache.peak_memory(candidate).total, default=None)


def with_device_count(cluster: Cluster, devices: int) -> Cluster:
    """Returns a cluster of so many devices; a part of a node may grow to the node as its maker builds it."""
    node = NODE_TYPES.get(cluster.device.name)
    per_node = node.devices if node is not None and cluster.nodes == 1 else cluster.devices_per_node
    return replace(cluster, devices_per_node=per_node, nodes=1).with_devices(devices)


def infeasible_error(cache: CostCache) -> ConfigError:
    """Returns the error for a workload without a feasible plan: the reason, and the smallest changes that help."""
    work, cluster = cache.work, cache.cluster
    smallest = smallest_candidate(cache)
    name = f"{work.model.name} on {cluster.device_count:,} {cluster.device.name}"
    if smallest is None:
        alternatives = ", or ".join(divisible_alternatives(work, cluster))
        return ConfigError(f"{name}: {describe_indivisible(work, cluster)}", f"try {alternatives}")
    if (divisible := indivisible_batch(work, cluster)) is not None:
        return divisible
    memory = cache.peak_memory(smallest)
    largest_class, largest = max(memory_by_class(memory).items(), key=lambda row: row[1])
    limit = f"{format_bytes(cache.memory_limit)} are available"
    if work.headroom:
        limit += f" with {format_percent(work.headroom)} of {format_bytes(cluster.device.memory)} as headroom"
    message = (
        f"{name} does not fit: the plan with the least memory ({describe_plan(cache.estimate(smallest).job)}) needs "
        f"{format_bytes(memory.total)} per device, and {limit}; the "
        f"largest part is {memory_label(largest_class)}, {format_bytes(largest)}"
    )
    return ConfigError(message, f"try {', or '.join(feasible_changes(work, cluster)) or 'a smaller model'}")


def indivisible_batch(work: Workload, cluster: Cluster) -> ConfigError | None:
    """Returns the error for a batch that does not divide over the devices, if the nearest one that does also fits."""
    devices, batch = cluster.device_count, work.global_batch
    if batch % devices == 0 or work.pinned:
        return None
    batches = sorted({batch // devices * devices, -(-batch // devices) * devices} - {0}, key=lambda n: abs(n - batch))
    alternatives = [f"--batch {n:,}".replace(",", "") for n in batches if fits(work.with_size(n), cluster)]
    for n in nearest_devices(work, cluster):
        if fits(work, with_device_count(cluster, n)):
            alternatives.append(f"{n:,} devices (--ranks {n})" if n < devices else f"{n:,} devices")
    if not alternatives:
        return None
    message = (
        f"{work.model.name} on {devices:,} {cluster.device.name}: a global batch of {count_samples(batch)} does not "
        f"divide over {devices:,} data-parallel ranks, and the layouts that divide it do not fit"
    )
    return ConfigError(message, f"try {', or '.join(alternatives)}")


def nearest_devices(work: Workload, cluster: Cluster) -> list[int]:
    """Returns the nearest numbers of devices, below and above, that some layout divides."""
    devices = cluster.device_count
    below = next((n for n in range(devices - 1, 0, -1) if divides(work, cluster, n)), 0)
    above = next((n for n in range(devices + 1, 2 * devices + 1) if divides(work, cluster, n)), 0)
    return [n for n in (below, above) if n]


def fits(work: Workload, cluster: Cluster) -> bool:
    cache = CostCache(work, cluster)
    smallest = smallest_candidate(cache)
    return smallest is not None and cache.fits(smallest)


def without_pin(work: Workload, key: str) -> Workload:
    return replace(work, pinned={other: value for other, value in work.pinned.items() if other != key})


def feasible_changes(work: Workload, cluster: Cluster) -> list[str]:
    """Returns the changes that each make the workload fit: one pin fewer, more or larger devices, shorter sequences,
    a smaller dtype.
    """
    changes = []
    smallest = smallest_candidate(CostCache(work, cluster))
    if smallest is not None:
        free = 1 - CostCache(work, cluster).peak_memory(smallest).total / cluster.device.memory
        changes += [f"--headroom {floor(1000 * free) / 1000:g}"] if 0.001 <= free < work.headroom else []
    for key, value in work.pinned.items():
        if fits(without_pin(work, key), cluster):
            changes.append(f"without --{key}={value}")
    if devices := min_devices(work, cluster):
        changes.append(f"{devices:,} devices")
    for device in sorted((node.device for node in NODE_TYPES.values()), key=lambda device: device.memory):
        larger = device.memory > cluster.device.memory and sustained_flops(device) >= sustained_flops(cluster.device)
        if larger and fits(work, replace(cluster, device=device)):
            changes.append(f"the same number of {device.name} with {format_bytes(device.memory)}")
            break
    sequence = work.sequence // 2
    while sequence >= 128 and isinstance(work.model, Architecture):
        if fits(work.with_size(sequence=sequence), cluster):
            changes.append(f"--sequence {sequence}")
            break
        sequence //= 2
    half = cluster.device.half_precision
    if work.precision in ("fp32", "fp64") and fits(with_precision(work, half), cluster):
        changes.append(f"--precision {half}")
    return changes


def sustained_flops(device: Device) -> float:
    """FLOP/s that large bf16 matmuls sustain: a variant with a lower power limit is no larger device."""
    return device.peak_flops["bf16"] * device.sustained_fraction.get("bf16", 1.0)


def min_devices(work: Workload, cluster: Cluster) -> int:
    """Returns the fewest devices on which the workload fits, in complete nodes; 0 if more devices do not help.

    The number is doubled until the workload fits, then found by bisection.
    """
    factor = 2
    while factor <= MAX_DEVICE_FACTOR and not fits(work, cluster.with_devices(cluster.device_count * factor)):
        factor *= 2
    if factor > MAX_DEVICE_FACTOR:
        return 0
    complete_nodes = cluster.nodes > 1 or cluster.device_count == cluster.devices_per_node
    unit = cluster.devices_per_node if complete_nodes else 1
    low, high = cluster.device_count * factor // 2, cluster.device_count * factor
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high):
            break
        low, high = (low, middle) if fits(work, cluster.with_devices(middle)) else (middle, high)
    return high


def with_precision(work: Workload, precision: str) -> Workload:
    compute: Any = precision
    config = work.base_config
    base = config and replace(config, precision=replace(config.precision, compute=compute))
    return replace(work, precision=precision, base_config=base)


def describe_indivisible(work: Workload, cluster: Cluster) -> str:
    """Returns the first divisibility rule that a pin breaks, or says that the batch does not divide."""
    model, pinned = work.model, work.pinned
    tensor, context = int(pinned.get("layout.tensor", 1)), int(pinned.get("layout.context", 1))
    pipeline, expert = int(pinned.get("layout.pipeline", 1)), int(pinned.get("layout.expert", 1))
    group = tensor * context * pipeline
    if cluster.device_count % group:
        factors = f"tensor {tensor} x context {context} x pipeline {pipeline}"
        return f"{cluster.device_count:,} devices do not divide into groups of {group:,} ({factors})"
    for axis, degree in (("tensor", tensor), ("context", context), ("pipeline", pipeline), ("expert", expert)):
        if degree > 1 and axis not in model.axes:
            return f"layout.{axis} = {degree} cannot serve {model.name} by its ParallelSpec"
    sizes = [("heads", model.heads), ("kv heads", model.kv_heads), ("tokens", work.sequence)]
    sizes += [("ffn columns", model.ffn)] if isinstance(model, Architecture) else []
    for name, number in sizes:
        if number % tensor:
            return f"layout.tensor = {tensor} does not divide {number:,} {name}"
    if pipeline > model.layers:
        return f"layout.pipeline = {pipeline} has more stages than {model.layers} layers"
    if work.sequence % (context * tensor):
        return f"layout.context = {context} does not divide {work.sequence:,} tokens"
    if expert > 1 and (not model.experts or model.experts % expert):
        return f"layout.expert = {expert} does not divide {model.experts} experts"
    pins = ", ".join(f"--{key}={value}" for key, value in pinned.items())
    return f"no layout divides a global batch of {work.global_batch:,}" + (f" with {pins}" if pins else "")


def divisible_alternatives(work: Workload, cluster: Cluster) -> list[str]:
    """Returns what divides: one pin fewer or with another value, other numbers of devices, another batch."""
    alternatives = []
    for key, value in work.pinned.items():
        if smallest_candidate(CostCache(without_pin(work, key), cluster)) is not None:
            alternatives.append(f"without --{key}={value}")
            alternatives += alternative_degrees(work, cluster, key)
    devices = cluster.device_count
    if nearest := [f"{n:,}" for n in nearest_devices(work, cluster)]:
        alternatives.append(f"{' or '.join(nearest)} devices")
    unpinned = CostCache(replace(work, pinned={}), cluster)
    if not alternatives and work.pinned and smallest_candidate(unpinned) is not None:
        alternatives.append("without these options")
    return alternatives or [f"a --batch that is a multiple of {divisors(devices)[-1]:,}"]


def alternative_degrees(work: Workload, cluster: Cluster, key: str) -> list[str]:
    """Returns the nearest values of a pinned degree that divide."""
    if key not in DEGREE_KEYS:
        return []
    nearest = sorted(divisors(cluster.device_count), key=lambda degree: abs(degree - int(work.pinned[key])))[:8]
    dividing = [
        degree
        for degree in nearest
        if smallest_candidate(CostCache(replace(work, pinned={**work.pinned, key: degree}), cluster)) is not None
    ]
    return [f"{key} = {', '.join(map(str, sorted(dividing)))}"] if dividing else []


def divides(work: Workload, cluster: Cluster, devices: int) -> bool:
    """Whether some layout divides; DDP is tried alone, since other layouts divide whatever it divides."""
    group = 1
    for key in ("layout.tensor", "layout.context", "layout.pipeline"):
        group *= int(work.pinned.get(key, 1))
    if devices % group or work.global_batch % (devices // group):
        return False
    return smallest_candidate(CostCache(work, with_device_count(cluster, devices))) is not None
