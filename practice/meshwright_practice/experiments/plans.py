"""Plans: memory, communication and step time that the planner predicts for layouts side by side. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from meshwright.base.config import load_config
from meshwright.base.hardware.cluster import Cluster, Link
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.describe import exposed_seconds, memory_by_class, wire_bytes_per_step
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.pictures import Bars, Curves

GIB = float(1 << 30)
UNITS = 10_000
"""Units of work whose ticks are counted; one device takes one tick for each."""
FULL = "activation_checkpoint.mode=full"
SHARDED = "layout.shard=parameters"


def predict(preset: str, cluster: Cluster, *settings: str) -> Estimate:
    """The estimate of one layout, without corrections that were learnt on this machine."""
    config = load_config(overrides=[f"preset={preset}", *settings])
    validate(config)
    job = PlannedJob.from_config(config, cluster)
    return estimate_step(job, estimate_memory(job))


def with_network(cluster: Cluster, gigabits: float) -> Cluster:
    """The cluster with so many Gbit/s per node, which its devices share."""
    share = gigabits * 1e9 / 8 / cluster.devices_per_node
    return replace(cluster, inter_node=Link(share, cluster.inter_node.latency))


def state_bytes(plan: Estimate) -> float:
    """Parameters, their gradients and optimizer state that the rank that needs most memory keeps. The gradients at the
    peak are not those: they include gradients of an unsharded unit before they are reduced.
    """
    memory, trainer = plan.peak_memory, plan.job.trainer
    gradients = memory.parameters * trainer.gradient_bytes / trainer.parameter_bytes
    return memory.parameters + gradients + memory.optimizer


def exposed_share(plan: Estimate) -> float:
    return exposed_seconds(plan) / plan.seconds


def memory_bars(title: str, plans: dict[str, Estimate]) -> Bars:
    """Memory by class of every plan."""
    classes = dict.fromkeys(name for plan in plans.values() for name in memory_by_class(plan.peak_memory))
    parts = {name: tuple(getattr(plan.peak_memory, name) / GIB for plan in plans.values()) for name in classes}
    return Bars(title, "GiB", tuple(plans), parts)


def fit(knobs: Knobs) -> Observation:
    """Predicts DDP and FSDP, with and without activation checkpointing, on one node."""
    preset, micro = str(knobs["model"]), int(knobs["micro"])
    cluster = resolve_cluster(str(knobs["cluster"]))
    common = (f"layout.replicate={cluster.device_count}", f"batch.micro={micro}")
    plans = {
        "DDP": predict(preset, cluster, *common),
        "DDP + checkpointing": predict(preset, cluster, *common, FULL),
        "FSDP": predict(preset, cluster, *common, SHARDED),
        "FSDP + checkpointing": predict(preset, cluster, *common, SHARDED, FULL),
    }
    ddp, checkpointed, fsdp, both = plans.values()
    capacity = cluster.device.memory
    values = {
        "memory": capacity / GIB,
        "ddp_needs": ddp.peak_memory.total / GIB,
        "ddp_checkpointed_needs": checkpointed.peak_memory.total / GIB,
        "fsdp_needs": fsdp.peak_memory.total / GIB,
        "fsdp_checkpointed_needs": both.peak_memory.total / GIB,
        "ddp_state": state_bytes(ddp) / GIB,
        "ddp_checkpointed_state": state_bytes(checkpointed) / GIB,
        "fsdp_state": state_bytes(fsdp) / GIB,
        "ddp_activations": (ddp.peak_memory.activations + ddp.peak_memory.logits) / GIB,
        "ddp_checkpointed_activations": (checkpointed.peak_memory.activations + checkpointed.peak_memory.logits) / GIB,
        "ddp_wire": wire_bytes_per_step(ddp) / GIB,
        "fsdp_wire": wire_bytes_per_step(fsdp) / GIB,
        "ddp_seconds": ddp.seconds,
        "ddp_checkpointed_seconds": checkpointed.seconds,
        "fsdp_seconds": fsdp.seconds,
        "flops_checkpointed": checkpointed.hardware_flops / checkpointed.model_flops,
        "state_bytes_per_parameter": state_bytes(ddp) / ddp.job.model.parameters,
    }
    notes = (f"{preset} on {knobs['cluster']}, micro-batch {micro}, {capacity / GIB:.1f} GiB per device.",)
    return Observation(values, memory_bars("predicted memory per rank", plans), notes)


def large_model(knobs: Knobs) -> Observation:
    """Predicts FSDP alone and FSDP with tensor and pipeline parallelism, for a model that FSDP alone does not fit."""
    preset, nodes = str(knobs["model"]), int(knobs["nodes"])
    cluster = resolve_cluster(f"h100:8x{nodes}")
    small_nodes = resolve_cluster(f"h100:4x{2 * nodes}")
    ranks = cluster.device_count
    common = ("batch.micro=1", FULL, SHARDED)
    plans = {
        "FSDP": predict(preset, cluster, *common, f"layout.replicate={ranks}"),
        "FSDP x TP 2": predict(preset, cluster, *common, f"layout.replicate={ranks // 2}", "layout.tensor=2"),
        "FSDP x TP 8": predict(preset, cluster, *common, f"layout.replicate={ranks // 8}", "layout.tensor=8"),
        "FSDP x TP 8 x PP 4": predict(
            preset, cluster, *common, f"layout.replicate={ranks // 32}", "layout.tensor=8", "layout.pipeline=4"
        ),
    }
    across = predict(preset, small_nodes, *common, f"layout.replicate={ranks // 8}", "layout.tensor=8")
    ddp = predict(preset, cluster, "batch.micro=1", FULL, f"layout.replicate={ranks}")
    fsdp, two, eight, three = plans.values()
    values = {
        "memory": cluster.device.memory / GIB,
        "ddp_state": state_bytes(ddp) / GIB,
        "fsdp_needs": fsdp.peak_memory.total / GIB,
        "tp2_needs": two.peak_memory.total / GIB,
        "tp8_needs": eight.peak_memory.total / GIB,
        "exposed_fsdp": exposed_share(fsdp),
        "exposed_tp2": exposed_share(two),
        "exposed_tp8": exposed_share(eight),
        "exposed_tensor_tp8": eight.phases["tensor"] / eight.seconds,
        "exposed_shard_tp8": eight.phases["shard"] / eight.seconds,
        "exposed_tp8_across_nodes": exposed_share(across),
        "micro_batches_tp8_to_tp2": eight.job.batch.accumulation / two.job.batch.accumulation,
        "seconds_tp2": two.seconds,
        "seconds_tp8": eight.seconds,
        "seconds_tp8_across_nodes": across.seconds,
        "bubble_pp4": three.phases.get("bubble", 0.0) / three.seconds,
        "data_degree_3d": float(three.job.layout.data_degree),
        "ranks": float(three.job.layout.ranks),
        "axes_3d": float(three.job.layout.tensor * three.job.layout.pipeline * three.job.layout.data_degree),
    }
    exposed = ", ".join(f"{axis} {eight.phases[axis]:.0f} s" for axis in ("tensor", "shard"))
    notes = (
        f"{preset} on {ranks} H100; a step of {fsdp.job.batch.global_} samples.",
        f"FSDP x TP 8: {eight.job.batch.accumulation} micro-batches, {eight.seconds:.0f} s; exposed: {exposed}.",
    )
    return Observation(values, memory_bars("predicted memory per rank", plans), notes)


def activation_remedies(knobs: Knobs) -> Observation:
    """Predicts what each remedy does to the activations of the rank that keeps most."""
    preset, micro = str(knobs["model"]), int(knobs["micro"])
    cluster = resolve_cluster("h100:8")
    common = (f"batch.micro={micro}",)
    plans = {
        "DDP": predict(preset, cluster, *common, "layout.replicate=8"),
        "checkpointing": predict(preset, cluster, *common, "layout.replicate=8", FULL),
        "half the micro-batch": predict(preset, cluster, f"batch.micro={micro // 2}", "layout.replicate=8"),
        "tensor 2": predict(preset, cluster, *common, "layout.replicate=4", "layout.tensor=2"),
        "context 2": predict(preset, cluster, *common, "layout.replicate=4", "layout.context=2"),
        "pipeline 2, 1F1B": predict(preset, cluster, *common, "layout.replicate=4", "layout.pipeline=2"),
        "pipeline 2, GPipe": predict(
            preset, cluster, *common, "layout.replicate=4", "layout.pipeline=2", "pipeline.schedule=gpipe"
        ),
    }
    activations = [max(memory.activations for memory in plan.memory_by_rank) for plan in plans.values()]
    names = ("ddp", "checkpointing", "half_micro_batch", "tensor", "context", "pipeline_1f1b", "pipeline_gpipe")
    values = {f"activations_{name}": bytes_ / activations[0] for name, bytes_ in zip(names, activations, strict=True)}
    values |= {
        "state_pipeline": state_bytes(plans["pipeline 2, 1F1B"]) / state_bytes(plans["DDP"]),
        "state_checkpointing": state_bytes(plans["checkpointing"]) / state_bytes(plans["DDP"]),
        "seconds_checkpointing": plans["checkpointing"].seconds / plans["DDP"].seconds,
    }
    notes = ("Activations are those of the rank that keeps most, relative to DDP.",)
    return Observation(values, memory_bars("predicted memory per rank", plans), notes)


def slow_network(knobs: Knobs) -> Observation:
    """Predicts DDP across nodes with a slow network, and what each remedy does to the exposed communication."""
    preset, gigabits = str(knobs["model"]), float(knobs["gigabits"])
    fast = resolve_cluster("h100:8x4")
    slow = with_network(fast, gigabits)
    common = ("batch.micro=2", "batch.global=64", "layout.replicate=32")
    plans = {
        "one node": predict(
            preset, resolve_cluster("h100:8"), "batch.micro=2", "batch.global=16", "layout.replicate=8"
        ),
        "4 nodes, fast network": predict(preset, fast, *common),
        "4 nodes, slow network": predict(preset, slow, *common),
        "4 times the samples": predict(preset, slow, *common, "batch.global=256"),
        "FSDP": predict(preset, slow, *common, SHARDED),
        "half the nodes": predict(
            preset, replace(slow, nodes=2), "batch.micro=4", "batch.global=64", "layout.replicate=16"
        ),
    }
    shares = [exposed_share(plan) for plan in plans.values()]
    names = ("one_node", "fast", "slow", "more_samples", "fsdp", "half_the_nodes")
    values = {f"exposed_{name}": share for name, share in zip(names, shares, strict=True)}
    plan_slow, more = plans["4 nodes, slow network"], plans["4 times the samples"]
    values |= {
        "wire_slow": wire_bytes_per_step(plan_slow) / GIB,
        "wire_more_samples": wire_bytes_per_step(more) / GIB,
        "samples_per_second_slow": plan_slow.job.batch.global_ / plan_slow.seconds,
        "samples_per_second_more": more.job.batch.global_ / more.seconds,
    }
    picture = Bars("exposed communication", "share of the step", tuple(plans), {"exposed": tuple(shares)})
    notes = (f"The slow network has {gigabits:g} Gbit/s per node.",)
    return Observation(values, picture, notes)


def ten_times(knobs: Knobs) -> Observation:
    """Predicts a run on ten times the devices: with the same global batch, and with ten times the batch."""
    preset, nodes = str(knobs["model"]), int(knobs["nodes"])
    base, large = resolve_cluster(f"h100:8x{nodes}"), resolve_cluster(f"h100:8x{10 * nodes}")
    common = ("batch.micro=1", SHARDED)
    now = predict(preset, base, *common, f"layout.replicate={base.device_count}")
    batch = now.job.batch.global_
    try:
        predict(preset, large, *common, f"layout.replicate={large.device_count}")
        refused = 0.0
    except ConfigError:
        refused = 1.0
    scaled = predict(preset, large, *common, f"layout.replicate={large.device_count}", f"batch.global={10 * batch}")
    values = {
        "ranks_now": float(base.device_count),
        "ranks_then": float(large.device_count),
        "global_batch": float(batch),
        "samples_per_rank_then": batch / large.device_count,
        "same_batch_is_refused": refused,
        "state_now": state_bytes(now) / GIB,
        "state_then": state_bytes(scaled) / GIB,
        "activations_ratio": scaled.peak_memory.activations / now.peak_memory.activations,
        "exposed_now": exposed_share(now),
        "exposed_then": exposed_share(scaled),
        "step_ratio_weak": scaled.seconds / now.seconds,
    }
    notes = (f"{preset}: {batch} samples per step on {base.device_count} ranks now.",)
    return Observation(values, memory_bars("predicted memory per rank", {"now": now, "10 x": scaled}), notes)


def scaling(knobs: Knobs) -> Observation:
    """Amdahl's and Gustafson's laws, and the strong and weak scaling that the planner predicts for a model."""
    serial, preset, gigabits = float(knobs["serial"]), str(knobs["model"]), float(knobs["gigabits"])
    counts = (1, 2, 4, 8, 16, 32, 64)
    clusters = {n: with_network(resolve_cluster(f"h100:{min(8, n)}x{max(1, n // 8)}"), gigabits) for n in counts}
    strong = [
        predict(preset, clusters[n], "batch.micro=1", "batch.global=512", f"layout.replicate={n}").seconds
        for n in counts
    ]
    weak = [
        predict(preset, clusters[n], "batch.micro=1", f"batch.global={32 * n}", f"layout.replicate={n}").seconds
        for n in counts
    ]
    speedups = [strong[0] / seconds for seconds in strong]
    fraction = {n: serial_fraction(s, n) for s, n in zip(speedups, counts, strict=True) if n > 1}
    values = {
        "amdahl_64": amdahl(serial, 64),
        "amdahl_1024": amdahl(serial, 1024),
        "amdahl_limit": 1 / serial,
        "counted_64": UNITS / counted_ticks(serial, 64),
        "counted_1024": UNITS / counted_ticks(serial, 1024),
        "counted_gain_of_16": counted_ticks(serial, 64) / counted_ticks(serial, 1024),
        "gustafson_64": serial + (1 - serial) * 64,
        "planned_speedup_8": speedups[3],
        "planned_speedup_64": speedups[-1],
        "serial_fraction_8": fraction[8],
        "serial_fraction_64": fraction[64],
        "speedup_64_from_8": amdahl(fraction[8], 64),
        "weak_speedup_64": 64 * weak[0] / weak[-1],
        "planned_limit_64": 1 / fraction[64],
        "strong_efficiency_8": speedups[3] / 8,
        "strong_efficiency_64": speedups[-1] / 64,
    }
    x = tuple(float(n) for n in counts)
    lines = {
        "Amdahl, serial fraction of 8 devices": tuple(amdahl(fraction[8], n) for n in x),
        "planned, strong": tuple(speedups),
        "planned, weak": tuple(n * weak[0] / seconds for n, seconds in zip(x, weak, strict=True)),
    }
    notes = (
        f"{preset} on 1 to 64 H100; the serial fraction is the one that explains the speedup.",
        f"Ticks are counted for {UNITS} units of work, of which {round(serial * UNITS)} run one after the other.",
    )
    return Observation(values, Curves("scaling", "devices", "speedup", x, lines), notes)


def amdahl(serial: float, processors: float) -> float:
    return 1 / (serial + (1 - serial) / processors)


def counted_ticks(serial: float, devices: int) -> int:
    """Ticks until UNITS units of work are done: the serial ones one per tick, then one per device and tick."""
    serial_units = round(serial * UNITS)
    left, ticks = UNITS - serial_units, serial_units
    while left > 0:
        left -= devices
        ticks += 1
    return ticks


def serial_fraction(speedup: float, processors: float) -> float:
    """The serial fraction with which Amdahl's law gives this speedup (Karp and Flatt)."""
    return (1 / speedup - 1 / processors) / (1 - 1 / processors)
