"""The formulas that the handbook calls for its figures; each asks the planner, the topology or the config."""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import numpy

from meshwright.base.config import load_config
from meshwright.base.config.batch import derive_batch
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.config.run_config import BatchConfig
from meshwright.base.hardware.links import collective_seconds, group_placement
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.io import format_bytes
from meshwright.base.models.registry import model_architecture, run_spec
from meshwright.base.topology.collectives import wire_fraction
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedule_orders import action_orders
from meshwright.base.topology.schedule_timeline import peak_in_flight
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.calibration.corrections import Corrections
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import StateMemory, activation_settings, state_memory
from meshwright.planner.cost.terms.activations import block_activations
from meshwright.planner.workload.planned_job import PlannedJob

LEVELS = {"none": "DDP", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3, FSDP2"}
"""What is sharded -> its usual name."""


@cache
def job(model: str, cluster: str, *overrides: str) -> PlannedJob:
    """The job of a preset on a cluster, with config keys as on the command line."""
    config = load_config(overrides=[f"preset={model}", *overrides])
    return PlannedJob.from_config(config, resolve_cluster(cluster), model)


@cache
def planned(model: str, cluster: str, *overrides: str) -> Estimate:
    return estimate(job(model, cluster, *overrides), corrections=Corrections([], 0))


def step_seconds(model: str, cluster: str, *overrides: str) -> float:
    """Predicted step time of a fixed layout."""
    return planned(model, cluster, *overrides).seconds


def exposed_seconds(model: str, cluster: str, axis: str, *overrides: str) -> float:
    """Predicted exposed communication of one axis per step."""
    return planned(model, cluster, *overrides).phases.get(axis, 0.0)


def collective_seconds_of_axis(model: str, cluster: str, axis: str, *overrides: str) -> float:
    """Predicted seconds of all collectives of one axis per step, hidden or exposed."""
    return sum(call.seconds for call in planned(model, cluster, *overrides).calls if call.axis == axis)


def accumulation(model: str, cluster: str, *overrides: str) -> int:
    """Micro-batches per step of a fixed layout."""
    return int(planned(model, cluster, *overrides).job.batch.accumulation)


def peak(model: str, cluster: str, memory_class: str, *overrides: str) -> float:
    """Predicted bytes of a memory class at the peak of a fixed layout; `total` is the whole device."""
    return float(getattr(planned(model, cluster, *overrides).peak_memory, memory_class))


def state_peak(model: str, cluster: str, *overrides: str) -> float:
    """Predicted bytes of parameters, gradients and optimizer state at the peak of a fixed layout."""
    return sum(peak(model, cluster, name, *overrides) for name in ("parameters", "gradients", "optimizer"))


def parameters(model: str) -> int:
    """The number of parameters of a preset."""
    return sum(parameter.local_numel() for parameter in run_spec(load_config(overrides=[f"preset={model}"])).parameters)


def active_parameters(model: str) -> int:
    """The parameters of a preset that one token uses."""
    return int(model_architecture(load_config(overrides=[f"preset={model}"]).model, model).active_parameters)


@cache
def state(model: str, shard: str, ranks: int, accumulation: int = 4) -> StateMemory:
    """Peak bytes of parameters, gradients and optimizer state of a rank, on CUDA."""
    keys = [f"preset={model}", f"layout.replicate={ranks}", f"layout.shard={shard}", "batch.micro=1"]
    config = load_config(overrides=[*keys, f"batch.global={ranks * accumulation}"])
    config = with_device_defaults(config, "cuda")
    layout = Layout.from_config(config.layout)
    return state_memory(config, layout, derive_batch(config.batch, layout.data_degree))


def state_bytes(model: str, shard: str, ranks: int, memory_class: str = "total", accumulation: int = 4) -> int:
    """Bytes of one memory class of the state of a rank, or of all three."""
    memory = state(model, shard, ranks, accumulation)
    total = memory.parameter + memory.gradient + memory.optimizer
    return total if memory_class == "total" else int(getattr(memory, memory_class))


def state_per_parameter(model: str, memory_class: str) -> float:
    """Bytes per parameter of one memory class without sharding."""
    return round(state_bytes(model, "none", 1, memory_class) / parameters(model), 3)


def state_table(model: str, ranks: int) -> str:
    """The state of a rank by level of sharding, as a table."""
    rows = [
        "| `layout.shard` | known as | parameters | gradients | optimizer state | total |",
        "|---|---|---|---|---|---|",
    ]
    for shard, name in LEVELS.items():
        memory = state(model, shard, ranks)
        sizes = [memory.parameter, memory.gradient, memory.optimizer]
        cells = " | ".join(format_bytes(size) for size in [*sizes, sum(sizes)])
        rows.append(f"| `{shard}` | {name} | {cells} |")
    return "\n".join(rows)


@cache
def volume(shard: str, ranks: int, accumulation: int = 1, *overrides: str) -> float:
    """Wire bytes that a rank sends per step for gradients and parameters, divided by the bytes of the parameters."""
    keys = [
        f"layout.replicate={ranks}",
        f"layout.shard={shard}",
        "batch.micro=1",
        f"batch.global={ranks * accumulation}",
    ]
    config = load_config(overrides=["preset=llama-1b", "precision.compute=fp32", *keys, *overrides])
    layout = Layout.from_config(config.layout)
    rows = comm_volume(config, layout, derive_batch(config.batch, layout.data_degree))
    sent = sum(row.wire_bytes for row in rows if row.axis != "control")
    return sent / (4 * sum(parameter.local_numel() for parameter in run_spec(config).parameters))


def volume_table(ranks: int, *accumulations: int) -> str:
    """The volume of each level of sharding by number of micro-batches per step, as a table."""
    head = " | ".join(f"{count} micro-batch{'es' if count > 1 else ''}" for count in accumulations)
    rows = [f"| `layout.shard` | known as | {head} |", "|---|---|" + "---|" * len(accumulations)]
    for shard, name in LEVELS.items():
        cells = " | ".join(f"{volume(shard, ranks, count):.3g} W" for count in accumulations)
        rows.append(f"| `{shard}` | {name} | {cells} |")
    return "\n".join(rows)


def wire(collective: str, ranks: int) -> float:
    """Bytes that a rank sends per byte of message."""
    numerator, denominator = wire_fraction(collective, ranks)
    return numerator / denominator


def wire_table(*ranks: int) -> str:
    """The bytes that a rank sends per byte of message, by collective and number of ranks, as a table."""
    rows = ["| collective | " + " | ".join(f"n = {n}" for n in ranks) + " |", "|---|" + "---|" * len(ranks)]
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"):
        rows.append(f"| {name.replace('_', '-')} | " + " | ".join(f"{wire(name, n):.4g} S" for n in ranks) + " |")
    return "\n".join(rows)


def collective_time(cluster: str, collective: str, message: float, ranks: int, stride: int = 1) -> float:
    """Predicted seconds of one collective among ranks that are `stride` apart."""
    resolved = resolve_cluster(cluster)
    return collective_seconds(resolved, collective, message, group_placement(resolved.devices_per_node, ranks, stride))


def bubble(schedule: str, ranks: int, micro_batches: int, stages: int = 1) -> float:
    """The idle fraction of a pipeline schedule with stages of equal cost."""
    return float(SCHEDULES[schedule].bubble(ranks, micro_batches, stages))


def bubble_table(schedule: str, micro_batches: int, *ranks: int) -> str:
    """The bubble by number of pipeline ranks, with the micro-batches doubling from `micro_batches`, as a table."""
    counts = [micro_batches * 2**power for power in range(4)]
    rows = [
        "| pipeline ranks | " + " | ".join(f"M = {count}" for count in counts) + " |",
        "|---|" + "---|" * len(counts),
    ]
    for degree in ranks:
        cells = " | ".join(f"{bubble(schedule, degree, count):.1%}" for count in counts)
        rows.append(f"| {degree} | {cells} |")
    return "\n".join(rows)


def in_flight(schedule: str, ranks: int, micro_batches: int, rank: int = 0) -> int:
    """Micro-batches whose activations a pipeline rank holds at its peak."""
    order = action_orders(schedule, ranks, micro_batches, SCHEDULES[schedule].default_stages)[rank]
    return peak_in_flight(order)


def in_flight_list(schedule: str, ranks: int, micro_batches: int) -> str:
    return ", ".join(str(in_flight(schedule, ranks, micro_batches, rank)) for rank in range(ranks))


def block_bytes(model: str, mode: str = "none", *overrides: str) -> float:
    """Activation bytes that one block saves for backward, for one micro-batch on an H100."""
    single = ("layout.replicate=1", "batch.micro=1", "batch.global=1")
    planned_job = job(model, "h100", f"activation_checkpoint.mode={mode}", *single, *overrides)
    assert planned_job.run_config is not None
    architecture = model_architecture(planned_job.run_config.model, model)
    return float(block_activations(architecture, activation_settings(planned_job), bool(architecture.experts)).saved)


def global_batch(
    micro: int, devices: int, accumulation: int, tensor: int = 1, pipeline: int = 1, context: int = 1
) -> int:
    """Samples per optimizer step; derived back by the config, which rejects sizes that do not divide."""
    replicas = devices // (tensor * pipeline * context)
    batch = derive_batch(BatchConfig(global_=micro * replicas * accumulation, micro=micro), replicas)
    assert batch.accumulation == accumulation
    return batch.global_


def segments_peak(layers: int, segments: int) -> int:
    """Units of activation at the peak if a model of `layers` equal layers is checkpointed in equal segments: one saved
    input per segment, and the layers of one segment during its recomputation (arXiv:1604.06174).
    """
    return segments + math.ceil(layers / segments)


def best_segments(layers: int) -> int:
    return min(range(1, layers + 1), key=lambda count: (segments_peak(layers, count), count))


def amdahl(serial: float, devices: int) -> float:
    """The speedup of Amdahl's law."""
    return 1 / (serial + (1 - serial) / devices)


def checkpoint_interval(stall: float, time_between_failures: float) -> float:
    """The interval of Young between checkpoints: the square root of 2 x stall x mean time between failures."""
    return math.sqrt(2 * stall * time_between_failures)


def lost_share(stall: float, time_between_failures: float, restart: float) -> float:
    """The share of time that is lost to saving, to repeated steps and to restarts, with the interval of Young."""
    interval = checkpoint_interval(stall, time_between_failures)
    return stall / interval + (interval / 2 + restart) / time_between_failures


def padded_samples(samples: int, ranks: int) -> int:
    """The samples that a sampler repeats if it pads every rank to the same number."""
    return math.ceil(samples / ranks) * ranks - samples


def mean_of_means(*micro_batches: tuple[float, int]) -> float:
    """The mean over micro-batches of their mean losses; a micro-batch is (sum of losses, tokens)."""
    return sum(total / count for total, count in micro_batches) / len(micro_batches)


def token_mean(*micro_batches: tuple[float, int]) -> float:
    """The mean loss over all tokens of the micro-batches."""
    return sum(total for total, _ in micro_batches) / sum(count for _, count in micro_batches)


def fp16(value: float) -> str:
    """A number after rounding to float16."""
    with numpy.errstate(over="ignore"):
        return f"{numpy.float16(value):.6g}"


def fp16_max() -> str:
    """The largest float16 number."""
    return f"{float(numpy.finfo(numpy.float16).max):.0f}"


def bf16(value: float) -> str:
    """A number after rounding to bfloat16: the upper 16 bits of float32, rounded to nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return f"{struct.unpack('<f', struct.pack('<I', rounded))[0]:.6g}"


def adam_difference(first: float, second: float) -> str:
    """Two ranks with the gradients `first` and `second`, one step of Adam from zero with a learning rate of 0.1: the
    update from the mean gradient, and the mean of the two updates.
    """

    def update(gradient: float) -> float:
        return -0.1 * gradient / (abs(gradient) + 1e-8) if gradient else 0.0

    return f"{update((first + second) / 2):.3g} and {(update(first) + update(second)) / 2:.3g}"


def ladder_table(model: str, cluster: str) -> str:
    """The steps from DDP to the plan of a preset, as a table."""
    from figures import command_json

    steps: list[dict[str, Any]] = command_json(f"meshwright plan {model} --cluster {cluster} --json")["ladder"]
    rows = ["| step | peak memory | step time | what it removes | bottleneck that remains |", "|---|---|---|---|---|"]
    for step in steps:
        plan = step["plan"]
        removed = step["resolved"] or "the start"
        cells = [format_bytes(plan["memory"]["total"]), f"{plan['seconds']:.3g} s", removed]
        rows.append(f"| {step['name']} | {' | '.join(cells)} | {step['bottleneck']['message']} |")
    return "\n".join(rows)


FORMULAS = {
    function.__name__: function
    for function in (
        step_seconds, exposed_seconds, collective_seconds_of_axis, accumulation, peak, state_peak, parameters,
        active_parameters, state_bytes, state_table, volume, volume_table, wire, wire_table, collective_time, bubble,
        bubble_table, in_flight, in_flight_list, block_bytes, global_batch, segments_peak, best_segments, amdahl,
        checkpoint_interval, lost_share, padded_samples, mean_of_means, token_mean, fp16, fp16_max, bf16,
        state_per_parameter, adam_difference, ladder_table,
    )
}  # fmt: skip
"""Name -> what `call:` markers of the handbook may call."""
