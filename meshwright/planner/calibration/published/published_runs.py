"""Reads published training runs as jobs that the planner can estimate.

A file of runs is untrusted: each field is validated. Settings that a run does not state are assumed, and the assumption
is recorded. Runs that contradict themselves, train adapters only or ran on unknown devices are excluded by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.config import Batch
from meshwright.config.reader import shorten
from meshwright.errors import ConfigError
from meshwright.io import parse_json, read_regular_file
from meshwright.planner.calibration.published.published_fields import (
    MAX_MICRO_BATCHES,
    MAX_STAGES,
    default_sizes,
    parse_activation_checkpoint,
    parse_cluster,
    parse_count,
    parse_degrees,
    parse_flag,
    parse_model,
    parse_precision,
    parse_sharding,
    refuse_adapters,
)
from meshwright.planner.calibration.published.published_figures import parse_memory, parse_seconds
from meshwright.planner.calibration.published.published_software import Software, run_software
from meshwright.planner.calibration.published.published_tables import read_table
from meshwright.planner.calibration.published.unstated_settings import assume_settings
from meshwright.planner.workload.planned_job import PlannedJob

MAX_RUNS = 5_000
"""Limit on the runs in a file."""
MAX_FILE_BYTES = 16 << 20
"""Size limit of a file of runs."""
RECORD_FIELDS = {"id": str, "source": str, "gpu": str, "gpus": int, "model": dict, "layout": dict, "reported": dict}
"""The fields that every record has."""


@dataclass(frozen=True)
class PublishedRun:
    """A run that somebody measured and published, and the job that it was."""

    name: str
    """id of the run in its file"""
    source: str
    """who published it, and where"""
    job: PlannedJob
    """the job, with assumptions for what is not stated"""
    seconds: float | None
    """measured step time"""
    memory: float | None
    """measured memory in bytes, of the kind that `memory_kind` gives"""
    memory_kind: str
    """tensors, reserved (peak of the allocator) or total (what nvidia-smi shows)"""
    out_of_memory: bool
    """whether the run failed for lack of memory"""
    flagged: bool
    """whether its source or its collector doubts the numbers"""
    assumptions: tuple[str, ...]
    """settings that the run does not state"""
    derived: tuple[str, ...] = ()
    """settings and figures that follow from others that the run states, and defaults for what it omits"""
    alternatives: tuple[tuple[PlannedJob, ...], ...] = ()
    """for each unstated setting, the job with other plausible values of it"""
    offloaded: float = 0.0
    """bytes of activations that are assumed to be in host memory"""
    made_to_fit: bool = False
    """whether settings were assumed such that the run fits, so that it cannot be a false out of memory"""

    @property
    def fully_stated(self) -> bool:
        """Whether the run states its software, activation checkpointing and micro-batch, and is not flagged.

        Sizes, half precision and sharding have the usual values if a run, such as vTrain's, omits them; `derived` lists
        them.
        """
        return not self.flagged and not self.assumptions


def read_published_runs(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """Reads a file of runs; returns those that the planner can estimate, and the reason for each excluded one."""
    runs: list[PublishedRun] = []
    excluded: dict[str, str] = {}
    names: set[str] = set()
    for index, row in enumerate(read_rows(path)):
        try:
            name = validate_record(row, names)
            runs.append(parse_run(row, name))
        except ConfigError as error:
            excluded[name] = str(error)
        except KeyError as error:
            excluded[name] = f"it does not state {error}"
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            shown = f" ({shorten(repr(row['id']))})" if isinstance(row, dict) and "id" in row else ""
            raise ConfigError(
                f"file of runs {path}, record {index}{shown} is not valid: {shorten(str(error), 200)}",
                "expected the fields of examples/published_runs.json",
            ) from None
    return runs, excluded


def read_rows(path: Path) -> list[Any]:
    """Returns the records of a file: a JSON list, or vTrain's table if the name ends in .csv."""
    expected = "a JSON list of runs"
    content = read_regular_file(path, MAX_FILE_BYTES, f"file of runs {path}", expected)
    if path.suffix.lower() == ".csv":
        rows: Any = read_table(content.decode("utf-8", "replace"), f"file of runs {path}", MAX_RUNS + 1)
    else:
        rows = parse_json(content, f"file of runs {path}", expected)
    if not isinstance(rows, list) or len(rows) > MAX_RUNS:
        raise ConfigError(f"{path} is not a list of at most {MAX_RUNS:,} runs", f"expected {expected}")
    if not rows:
        raise ConfigError(f"{path} contains no run", f"expected {expected}")
    return rows


def validate_record(row: Any, names: set[str]) -> str:
    """Returns the name of a run and adds it to `names`; raises ValueError if the record has not the form of a run.

    A record of this form may still omit a size, which excludes the run from the scores.
    """
    if not isinstance(row, dict):
        raise ValueError(f"it is {shorten(repr(row))} and not an object")
    for key, kind in RECORD_FIELDS.items():
        if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
            raise ValueError(f"{key} is {shorten(repr(row.get(key)))}, expected {kind.__name__}")
    if row["id"] in names:
        raise ValueError("an earlier record has the same id")
    names.add(row["id"])
    return str(row["id"])


def parse_run(row: dict[str, Any], name: str) -> PublishedRun:
    """Parses one run; raises an error if it is not a full training run of a decoder on known devices."""
    refuse_adapters(row)
    source, notes, stated = str(row["source"]), str(row.get("notes", "")), row["layout"]
    devices = parse_count(row, "gpus", maximum=1 << 24)
    model = parse_model(row["model"])
    cluster = parse_cluster(str(row["gpu"]), devices, f"{source} {notes}")
    precision, sharding = parse_precision(row.get("precision")), parse_sharding(stated.get("sharding"))
    on_grace = cluster.device.host == "grace"
    software = run_software(row, precision, sharding in ("parameters", "gradients"), on_grace)
    trainer = software.profile
    if stated.get("sp") is not None:
        trainer = replace(trainer, sequence_parallel=parse_flag(stated, "sp"))
    degrees = parse_degrees(stated, devices, sharding not in (None, "none"))
    unstated = set() if sharding else {"sharding"}
    sharding = sharding or trainer.default_sharding
    data, pipeline = degrees.data, degrees.pipeline
    fsdp_degree = parse_count(stated, "fsdp_degree", maximum=data) if stated.get("fsdp_degree") else data
    global_batch = parse_count(row, "global_batch")
    if global_batch < data:
        raise ConfigError(f"global_batch = {global_batch} is less than dp = {data}", "expected a sample per replica")
    stages = parse_stages(stated, software, pipeline, model.layers)
    if pipeline > 1 and stages is None and trainer.interleaves and not stated.get("schedule"):
        unstated.add("stages")
    stages = stages or 1
    batch = parse_batch(row, software, global_batch, data, pipeline * stages)
    if row.get("micro_batch") is None:
        unstated.add("micro_batch")
    activation_checkpoint = parse_activation_checkpoint(row.get("recompute"))
    if activation_checkpoint is None:
        unstated.add("checkpoint")
    job = PlannedJob(
        model,
        cluster,
        degrees.layout(fsdp_degree if sharding != "none" else 1),
        batch,
        parse_count(row["model"], "seq"),
        sharding,
        precision,
        activation_checkpoint or "none",
        1,
        "interleaved" if stages > 1 else "1f1b",
        stages,
        trainer.context_method,
        trainer,
    )
    assumed = assume_settings(job, frozenset(unstated))
    seconds, how = parse_seconds(row, assumed.job)
    memory, memory_kind = parse_memory(row["reported"], notes)
    return PublishedRun(
        name,
        source,
        assumed.job,
        seconds,
        memory,
        memory_kind,
        out_of_memory=parse_flag(row["reported"], "oom"),
        flagged=bool(row.get("quality_flags")),
        assumptions=(*software.assumptions, *assumed.assumptions),
        derived=(*degrees.derived, *how, *default_sizes(row), *default_sharding(assumed.job, unstated)),
        alternatives=assumed.alternatives,
        offloaded=assumed.offloaded,
        made_to_fit=assumed.made_to_fit,
    )


def default_sharding(job: PlannedJob, unstated: set[str]) -> tuple[str, ...]:
    """Says that a run has the sharding of its trainer, if it states none."""
    if "sharding" not in unstated or job.sharding != job.trainer.default_sharding or job.layout.data_degree == 1:
        return ()
    return (f"sharding {job.sharding}, the default of {job.trainer.name}, which the run does not state",)


def parse_stages(stated: dict[str, Any], software: Software, pipeline: int, layers: int) -> int | None:
    """Returns the stages per rank that a run states, two if it states no more than an interleaved schedule."""
    stages = parse_count(stated, "vpp", maximum=layers) if stated.get("vpp") else None
    if stages is None and "interleaved" in software.flags and pipeline > 1:
        stages = 2
    if pipeline > layers or pipeline * (stages or 1) > 4 * layers:
        raise ValueError(f"{layers} layers cannot be split into {pipeline} x {stages} pipeline stages")
    if pipeline * (stages or 1) > MAX_STAGES:
        raise ValueError(f"pp x vpp = {pipeline} x {stages or 1} is out of range, expected at most {MAX_STAGES} stages")
    return stages


def parse_batch(row: dict[str, Any], software: Software, global_batch: int, data: int, stage_count: int) -> Batch:
    """Returns the batch; the batch of a rank is split over pipeline stages if the trainer does so."""
    local_batch = global_batch // data
    micro = parse_count(row, "micro_batch") if row.get("micro_batch") is not None else 1
    if software.profile.splits_batch_by_stage and stage_count > 1:
        micro = local_batch // stage_count
    micro = max(1, min(micro, local_batch))
    accumulation = max(1, local_batch // micro)
    if accumulation > MAX_MICRO_BATCHES:
        raise ValueError(
            f"{accumulation:,} micro-batches per step are out of range, expected at most {MAX_MICRO_BATCHES:,}"
        )
    return Batch(global_batch, micro, data, accumulation)
