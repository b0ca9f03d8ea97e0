"""Parses the pipeline schedule, the stages and the batch of a published run, and bounds the passes that are predicted.

The planner's schedules are those of `topology/schedules.py`. A run with another one is predicted with the most similar
of them, which is an assumption.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.config import Batch
from meshwright.base.config.reader import shorten
from meshwright.base.topology.schedules import find_schedule
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import InvalidRecordField, parse_count
from meshwright.planner.calibration.published.published_software import Software
from meshwright.planner.cost.trace.schedule_passes import ScheduleSize, shortened

MAX_STAGES = 256
"""Limit on the pipeline stages of a run, over all ranks: the published ones have up to 128."""
MAX_MICRO_BATCHES = 4096
"""Limit on the micro-batches of a step: the published ones have up to 560."""
MAX_PASSES = 1 << 16
"""Limit on the forward passes of a run that are predicted, over all stages; full rounds of a pipeline repeat the third.
The published ones have up to 12,288, which take 0.1 s, and the limit takes one second."""
MAX_FILE_PASSES = 1 << 18
"""Limit on the forward passes of the different schedules of a file: the passes of each are kept while the file is
predicted. All published runs together have 78,000."""
NAMES: tuple[tuple[str, str, bool], ...] = (
    (r"dual ?pipe ?v", "dualpipev", True),
    (r"dual ?pipe", "dualpipev", False),
    (r"zb ?v|zbv ?zero ?bubble|v ?half|v ?min", "zbv", False),
    (r"interleaved ?(?:zero ?bubble|zb)|zero ?bubble|\bzb|\bh[12]\b", "zero-bubble", True),
    (r"looped|breadth|\bbfs\b", "interleaved", False),
    (r"inter ?leav|virtual", "interleaved", True),
    (r"gpipe|afab|all ?forward|f ?then ?b", "gpipe", True),
    (r"1 ?f ?1 ?b|one ?f(?:orward)? ?one ?b|pipedream|dapple", "1f1b", True),
)
"""A pattern in a run's name of its schedule -> the planner's schedule, and whether it is the same; the first match
counts. V-Half and V-Min are ZB-V with less memory; DualPipe has a second copy of the parameters."""
EXACT_NAMES = re.compile(r"(?:schedule )?zb ?v(?: ?zero ?bubble)?")
NEGATED = re.compile(r"\b(?:no|non|not|without) \w+")


@dataclass(frozen=True)
class ParsedSchedule:
    """The schedule of a run and its stages per rank."""

    name: str
    stages: int | None
    """None if the run does not state them"""
    assumptions: tuple[str, ...] = ()


@dataclass
class PassBudget:
    """The passes of a file that are predicted so far: every schedule of one size counts once."""

    counted: set[ScheduleSize] = field(default_factory=set)
    passes: int = 0

    def add(self, sizes: list[ScheduleSize]) -> None:
        """Counts the schedules of a run; raises ConfigError if they are too large, or if all together are."""
        new = {shortened(size) for size in sizes} - self.counted
        largest = max(map(count_passes, sizes))
        if largest > MAX_PASSES:
            raise ConfigError(
                f"its schedule has {largest:,} different passes (stages x micro-batches)",
                f"expected at most {MAX_PASSES:,}",
            )
        if self.passes + sum(map(count_passes, new)) > MAX_FILE_PASSES:
            raise ConfigError(
                f"the schedules of the runs before it have {self.passes:,} different passes (stages x micro-batches)",
                f"expected a file with at most {MAX_FILE_PASSES:,}",
            )
        self.counted |= new
        self.passes += sum(map(count_passes, new))


def count_passes(size: ScheduleSize) -> int:
    """The forward passes of a schedule over all stages, without rounds that repeat."""
    short = shortened(size)
    return short.ranks * short.stages_per_rank * short.micro_batches if short.ranks > 1 else 1


def parse_schedule(stated: dict[str, Any], software: Software, pipeline: int, layers: int) -> ParsedSchedule:
    """Returns the schedule that a run states, with as many stages per rank as it states, or as the schedule needs."""
    if pipeline > layers:
        raise ConfigError(f"{layers} layers cannot be split into {pipeline} pipeline stages")
    stages = parse_count(stated, "vpp", maximum=layers) if stated.get("vpp") else None
    if pipeline == 1:
        return ParsedSchedule("1f1b", 1)
    text = str(stated.get("schedule") or "")
    name, is_same = schedule_name(text)
    if name is None and "interleaved" in software.flags and stages is None:
        name = "interleaved"
    assumptions = []
    if text and not is_same:
        assumptions.append(f"schedule {name or '1f1b'} in place of {shorten(text)!r}, which the planner does not know")
    if name in (None, "1f1b", "interleaved"):
        is_unstated = stages is None and (name == "interleaved" or not text) and software.profile.interleaves
        if stages is None and name == "interleaved" and not is_unstated:
            stages = find_schedule(name).default_stages
            assumptions.append(f"{stages} stages per pipeline rank, which the run does not state")
        elif stages is None and not is_unstated:
            stages = 1
        name = "interleaved" if (stages or 1) > 1 else "1f1b"
    else:
        schedule = find_schedule(name)
        if stages is None:
            single = schedule.min_stages == 1 and "inter" not in text.lower()
            stages = 1 if single else schedule.default_stages
        if stages < schedule.min_stages or (schedule.max_stages and stages > schedule.max_stages):
            raise ConfigError(f"schedule {shorten(text)!r} does not have vpp = {stages} stages per rank")
    validate_stages(pipeline, stages or 1, layers)
    return ParsedSchedule(name, stages, tuple(assumptions))


def schedule_name(text: str) -> tuple[str | None, bool]:
    """Returns the planner's name of a schedule, None if the text names none, and whether it is the same schedule."""
    words = NEGATED.sub("", re.sub(r"[^a-z0-9]+", " ", text.lower())).strip()
    if not words:
        return None, True
    name, is_same = next(((name, same) for pattern, name, same in NAMES if re.search(pattern, words)), (None, False))
    return name, is_same or bool(EXACT_NAMES.fullmatch(words))


def validate_stages(pipeline: int, stages: int, layers: int) -> None:
    """Raises ConfigError if the layers do not fill the stages, and InvalidRecordField if there are too many stages."""
    if pipeline * stages > layers + 2:  # embedding and head may be stages of their own
        raise ConfigError(f"{layers} layers cannot be split into {pipeline} x {stages} pipeline stages")
    if pipeline * stages > MAX_STAGES:
        raise InvalidRecordField(
            f"pp x vpp = {pipeline} x {stages} is out of range, expected at most {MAX_STAGES} stages"
        )


def parse_batch(row: dict[str, Any], software: Software, data: int, stage_count: int) -> Batch:
    """Returns the batch; the batch of a rank is split over pipeline stages if the trainer does so and it divides."""
    global_batch = parse_count(row, "global_batch")
    local_batch, rest = divmod(global_batch, data)
    if not local_batch or rest:
        relation = "is less than" if not local_batch else "is not a multiple of"
        raise ConfigError(f"global_batch = {global_batch} {relation} dp = {data}", "expected a sample per replica")
    micro = parse_count(row, "micro_batch") if row.get("micro_batch") is not None else 1
    if software.profile.splits_batch_by_stage and stage_count > 1:
        micro = local_batch // stage_count if local_batch % stage_count == 0 else 1
    if local_batch % micro:
        raise ConfigError(
            f"micro_batch = {micro:,} does not divide the {local_batch:,} samples of a data-parallel rank",
            "expected global_batch / dp to be a multiple of it",
        )
    accumulation = local_batch // micro
    if accumulation > MAX_MICRO_BATCHES:
        raise InvalidRecordField(
            f"{accumulation:,} micro-batches per step are out of range, expected at most {MAX_MICRO_BATCHES:,}"
        )
    return Batch(global_batch, micro, data, accumulation)
