"""The start record of an attempt: steps, model, layout, groups, data, versions."""

from __future__ import annotations

import platform
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from meshwright.base.hardware.processor import processor_name
from meshwright.base.models.registry import run_spec
from meshwright.base.records.events import Event, EventLog
from meshwright.base.records.heartbeat import process_start_time
from meshwright.base.topology.layout import stages_per_rank
from meshwright.base.topology.schedule_orders import action_orders
from meshwright.base.topology.schedule_timeline import bubble_formula, peak_in_flight
from meshwright.base.topology.unused_settings import unused_settings
from meshwright.core.data.chat.template import encoding_notes
from meshwright.core.data.stream import Stream
from meshwright.core.data.token_files import source_notes
from meshwright.core.parallel.float8 import float8_layers
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.clock_offset import measure_clock_offset
from meshwright.core.trainer.records.shown_output import show_output
from meshwright.rl.tasks.answer_reward import answer_reward
from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.core.trainer.job import Job

MAX_GROUPS = 64
"""Process groups per axis that the start record lists."""


def write_start(
    log: EventLog, job: Job, parallel_model: ParallelModel, stream: Stream, identity: dict[str, Any], world: World
) -> None:
    """Writes what an attempt starts with. From then on, what rank 0 prints is written too, unless the process of the
    rank has the terminal, as under torchrun.
    """
    log.write("start", **start_record(job, parallel_model, stream, identity, world))
    for change in identity["code_changes"]:
        if change["attempt"] == job.attempt:
            log.write("code_changed", step=change["step"], changes=change["changes"])
    if world.rank == 0 and job.supervised:
        show_output(lambda line: log.write("output", text=line))


def start_record(
    job: Job, parallel_model: ParallelModel, stream: Stream, identity: dict[str, Any], world: World
) -> Event:
    """Returns the fields of the `start` event."""
    return {
        "steps": job.config.steps,
        "restart": job.restart,
        "supervised": job.supervised,
        "identity": identity["identity_fingerprint"],
        "placement": identity["placement_fingerprint"],
        "parameters": parameter_count(job),
        "decoder": job.custom is None,
        "user_code": bool(job.custom is not None or job.callbacks or job.update.code),
        "unit": job.custom.unit if job.custom is not None else "tokens",
        "layout": str(job.layout),
        "shard": job.config.layout.shard,
        "inferred": list(job.custom.inferred if job.custom is not None else ()),
        "notes": unused_settings(job.given or job.config, own_model=job.custom is not None)
        + encoding_notes(job.config)
        + source_notes(job.sources)
        + list(job.custom.notes if job.custom is not None else ())
        + (["float8 is emulated on CPU"] if job.config.precision.float8 and world.device.type == "cpu" else []),
        "pipeline": pipeline_record(job, parallel_model, world.rank),
        "groups": {axis: list(islice(job.layout.groups(axis), MAX_GROUPS)) for axis in job.layout.active_axes},
        "hosts": world.hosts,
        "ranks": world.size,
        "process_started": round(process_start_time(), 2),
        "batch": str(job.batch),
        "device": device_name(world.device),
        "processor": processor_name(),
        "precision": job.config.precision.compute,
        "float8": float8_layers(parallel_model.module),
        "compile": job.config.compile.enabled,
        "optimizer": job.config.optimizer.factory or job.config.optimizer.kind,
        "schedule": job.config.schedule.function or job.config.schedule.kind,
        **reward_record(job),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "meshwright": __version__,
        "sources": [s.name for s in job.sources],
        "samples": stream.samples,
        "held_out": sum(part.held_out for part in stream.sources),
        "epoch_steps": round(sum(part.trained for part in stream.sources) / stream.global_batch, 2),
    }


def reward_record(job: Job) -> Event:
    """The name of the user's reward function, if the run has one."""
    reward = job.rollouts.setup.reward if job.rollouts is not None else answer_reward
    named = getattr(reward, "__qualname__", type(reward).__qualname__)
    return {} if reward is answer_reward else {"reward": str(named)[:200]}


def rank_record(job: Job, parallel_model: ParallelModel, world: World) -> Event:
    """Returns the fields of the `rank` record of the spans: where the rank is, and the offset of its clock. Every rank
    calls it.
    """
    coordinates, offset = job.layout.coordinates(world.rank), measure_clock_offset(world.rank, world.size)
    return {
        "rank": world.rank,
        "ranks": world.size,
        "coordinates": {axis: coordinates[axis] for axis in job.layout.active_axes},
        "stages": sorted(parallel_model.stage_blocks),
        "device": world.device.type,
        "clock_offset": offset.seconds,
        "clock_error": offset.error,
    }


def pipeline_record(job: Job, parallel_model: ParallelModel, rank: int) -> Event | None:
    """Returns what the schedule predicts for this rank, to be compared with what steps record; None without stages."""
    layout, kind = job.layout, job.config.pipeline.schedule
    if layout.pipeline == 1:
        return None
    per_rank, position = stages_per_rank(job.config), layout.coordinates(rank)["pipeline"]
    record: Event = {
        "schedule": kind,
        "stages": {stage: [blocks[0], blocks[-1]] for stage, blocks in parallel_model.stage_blocks.items()},
        "live": peak_in_flight(action_orders(kind, layout.pipeline, job.batch.accumulation, per_rank)[position]),
    }
    bubble = bubble_formula(kind, layout.pipeline, job.batch.accumulation, per_rank)
    return record | {"bubble": round(float(bubble[1]), 4) if bubble is not None else None}


def parameter_count(job: Job) -> int:
    """Returns the number of parameters of the full model."""
    if job.custom is None:
        return run_spec(job.config).parameter_count
    return sum(p.numel() for module in job.custom.modules() for p in module.parameters())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
