"""Reads published training runs as jobs that the planner can estimate.

A file of runs is untrusted: each field is validated. Settings that a run does not state are assumed, and the assumption
is recorded. Runs that contradict themselves, train adapters only or ran on unknown devices are excluded by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.base.config.reader import shorten
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_clusters import parse_cluster
from meshwright.planner.calibration.published.published_fields import (
    UNSTATED_PRECISION,
    parse_activation_checkpoint,
    parse_degrees,
    parse_fsdp_degree,
    parse_precision,
    parse_sharding,
    refuse_adapters,
    validate_degrees,
)
from meshwright.planner.calibration.published.published_figures import parse_memory, parse_seconds
from meshwright.planner.calibration.published.published_models import parse_model
from meshwright.planner.calibration.published.published_records import (
    InvalidRecordField,
    parse_count,
    parse_flag,
    read_rows,
    record_name,
    validate_form,
)
from meshwright.planner.calibration.published.published_schedules import PassBudget, parse_batch, parse_schedule
from meshwright.planner.calibration.published.published_software import run_software
from meshwright.planner.calibration.published.unstated_settings import assume_settings, schedule_sizes
from meshwright.planner.workload.planned_job import PlannedJob

OUT_OF_RANGE = "its sizes are out of the range in which the cost model can compute"
NOT_VALID = "its record is not valid"
"""How the reason for a record begins that has a field which is not possible."""


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
    budget = PassBudget()
    first_invalid, valid = "", 0
    for index, row in enumerate(read_rows(path)):
        try:
            name = record_name(row, names)
        except InvalidRecordField as error:
            shown = f" ({shorten(repr(row['id']))})" if isinstance(row, dict) and "id" in row else ""
            raise invalid_file(path, f"record {index}{shown} is not valid: {error}") from None
        try:
            runs.append(parse_run(row, name, budget))
            valid += 1
        except InvalidRecordField as error:
            excluded[name] = f"{NOT_VALID}: {error}"
            first_invalid = first_invalid or f"record {index} ({shorten(repr(name))}) is not valid: {error}"
        except ConfigError as error:
            excluded[name] = str(error)
            valid += 1
        except (ArithmeticError, ValueError):
            excluded[name] = OUT_OF_RANGE
    if first_invalid and not valid:
        raise invalid_file(path, first_invalid)
    return runs, excluded


def invalid_file(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"file of runs {path}, {reason}", "expected the fields of examples/published_runs.json")


def parse_run(row: dict[str, Any], name: str, budget: PassBudget | None = None) -> PublishedRun:
    """Parses one run; raises an error if it is not a full training run of a decoder on known devices, or if the budget
    of its file is used up.
    """
    validate_form(row)
    refuse_adapters(row)
    source, notes, stated = row["source"], str(row.get("notes") or ""), row["layout"]
    devices = parse_count(row, "gpus", maximum=1 << 24)
    model = parse_model(row["model"])
    cluster, node_devices, derived_network = parse_cluster(row, devices, f"{source} {notes}")
    precision, sharding = parse_precision(row.get("precision")), parse_sharding(stated)
    on_grace = cluster.device.host == "grace"
    software = run_software(row, precision, sharding.kind in ("parameters", "gradients"), on_grace)
    trainer = software.profile
    if stated.get("sp") is not None:
        trainer = replace(trainer, sequence_parallel=parse_flag(stated, "sp"))
    sequence = parse_count(row["model"], "seq")
    degrees = parse_degrees(stated, devices, sharding.kind not in (None, "none"))
    validate_degrees(degrees, model.sizes, sequence)
    unstated = set() if sharding.kind else {"sharding"}
    kind = sharding.kind or trainer.default_sharding
    fsdp_degree, assumed_degree = parse_fsdp_degree(stated, sharding, degrees, node_devices)
    schedule = parse_schedule(stated, software, degrees.pipeline, model.sizes.layers)
    if schedule.stages is None:
        unstated.add("stages")
    stages = schedule.stages or 1
    batch = parse_batch(row, software, degrees.data, degrees.pipeline * stages)
    if row.get("micro_batch") is None:
        unstated.add("micro_batch")
    activation_checkpoint = parse_activation_checkpoint(row.get("recompute"))
    if activation_checkpoint is None:
        unstated.add("checkpoint")
    job = PlannedJob(
        model.sizes,
        cluster,
        degrees.layout(fsdp_degree if kind != "none" else 1),
        batch,
        sequence,
        kind,
        precision,
        activation_checkpoint or "none",
        1,
        schedule.name,
        stages,
        trainer.context_method,
        trainer,
    )
    (budget or PassBudget()).add(schedule_sizes(job, frozenset(unstated)))
    assumed = assume_settings(job, frozenset(unstated))
    seconds = parse_seconds(row, assumed.job)
    memory, memory_kind = parse_memory(row["reported"], notes)
    read_as = (*software.assumptions, *sharding.assumptions, *assumed_degree, *schedule.assumptions)
    default_precision = f"{UNSTATED_PRECISION}, which the run does not state" if row.get("precision") is None else ""
    defaults = (
        *model.defaults,
        *([default_precision] if default_precision else ()),
        *derived_network,
        *cluster.device.assumed_rates(precision),
    )
    return PublishedRun(
        name,
        source,
        assumed.job,
        seconds.value,
        memory,
        memory_kind,
        out_of_memory=parse_flag(row["reported"], "oom"),
        flagged=bool(row.get("quality_flags")),
        assumptions=(*read_as, *assumed.assumptions, *seconds.assumptions),
        derived=(*degrees.derived, *seconds.derived, *defaults, *default_sharding(assumed.job, unstated)),
        alternatives=assumed.alternatives,
        offloaded=assumed.offloaded,
        made_to_fit=assumed.made_to_fit,
    )


def default_sharding(job: PlannedJob, unstated: set[str]) -> tuple[str, ...]:
    """Says that a run has the sharding of its trainer, if it states none."""
    if "sharding" not in unstated or job.sharding != job.trainer.default_sharding or job.layout.data_degree == 1:
        return ()
    return (f"sharding {job.sharding}, the default of {job.trainer.name}, which the run does not state",)
