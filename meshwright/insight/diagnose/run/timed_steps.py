"""The typical steps of a run on all of its ranks, side by side, with the settings they ran under. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import Batch, RunConfig, config_from_dict
from meshwright.base.config.device_defaults import DeviceType, with_device_defaults
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.records.events import Event
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import LIMITING_SHARE as LIMITING_SHARE

MIN_STEPS = 6
"""Steps that a verdict on times needs."""
MAX_STEPS = 1024
"""The newest steps that are compared."""
MAX_RANKS = 1024
MAX_PEERS = 16
"""Ranks of a pipeline stage up to which each is compared with the others alone."""

Seconds = NDArray[np.float64]
"""One row per rank, one column per step."""


@dataclass(frozen=True)
class TimedSteps:
    """The steps that every rank has recorded in one attempt, without the first ones and those with counters."""

    attempt: int
    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    seconds: Seconds
    exposed: Seconds
    """seconds in which the training thread of a rank waited for others"""
    local: dict[str, Seconds]
    """by phase, the seconds that a rank spent by itself"""
    buckets: float
    """gradient buckets per step; 0 without DDP"""
    bucket_bytes: float
    """message bytes of all buckets of a step"""
    config: RunConfig
    layout: Layout
    batch: Batch
    start: Event
    """the start record of rank 0"""

    @property
    def duration(self) -> float:
        """The typical step time in seconds."""
        return float(np.median(self.seconds.mean(axis=0)))

    @property
    def communication(self) -> float:
        """Exposed seconds per step of the rank that waits least: that rank waits for transfers, not for other ranks."""
        return float(np.median(self.exposed.min(axis=0)))

    def local_seconds(self, *phases: str) -> Seconds:
        """The local seconds of several phases, by default of all."""
        total: Seconds = np.sum([self.local[phase] for phase in phases or self.local], axis=0)
        return total

    @cached_property
    def stages(self) -> NDArray[np.int64]:
        """The pipeline position of the rank in every row."""
        return np.array([self.layout.coordinates(rank)["pipeline"] for rank in self.ranks])

    def above_peers(self, seconds: Seconds, *, across_stages: bool = False) -> Seconds:
        """For every rank and step, the seconds above the median of the other ranks with the same work: those of its
        pipeline stage, or of all stages for work that does not depend on it. Zero for a rank without peers.
        """
        above = np.zeros_like(seconds)
        stages = np.zeros_like(self.stages) if across_stages else self.stages
        for stage in np.unique(stages):
            rows = np.flatnonzero(stages == stage)
            if len(rows) > MAX_PEERS:  # one rank more or less does not move the median
                above[rows] = seconds[rows] - np.median(seconds[rows], axis=0)
            elif len(rows) > 1:
                for row in rows:
                    above[row] = seconds[row] - np.median(seconds[rows[rows != row]], axis=0)
        return above

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every rank of the layout; empty if they are not on record."""
        hosts = self.start.get("hosts")
        known = isinstance(hosts, list) and len(hosts) == self.layout.ranks and all(isinstance(h, str) for h in hosts)
        return tuple(hosts) if isinstance(hosts, list) and known else ()

    @property
    def is_cpu(self) -> bool:
        return self.start.get("device") == "cpu"


_NEWEST: WeakKeyDictionary[RunHistory, tuple[float, TimedSteps | None]] = WeakKeyDictionary()
"""History -> the time of its newest record when its steps were combined, and the result."""


def timed_steps(history: RunHistory) -> TimedSteps | None:
    """The typical steps of the newest attempt that has enough of them; None if no attempt has. Every class of causes
    needs them, so that they are kept until the history grows.
    """
    known = _NEWEST.get(history)
    newest = history.newest_record or 0.0
    if known is None or known[0] != newest:
        known = _NEWEST[history] = newest, read_timed_steps(history)
    return known[1]


def config_error(history: RunHistory) -> str:
    """Why the settings of a run cannot be used, or an empty string."""
    try:
        config = config_from_dict(history.config)
        validate(config, own_model=bool(config.custom_model.class_))
    except ConfigError as error:
        return str(error)
    return ""


def custom_model_options(history: RunHistory) -> str:
    """The command-line options that name the custom model of a run; empty for a built-in model."""
    try:
        custom = config_from_dict(history.config).custom_model
    except ConfigError:
        return ""
    return custom.options if custom.class_ else ""


def on_its_device(config: RunConfig, start: Mapping[str, Any]) -> RunConfig:
    """The config with the defaults of the device that an attempt ran on."""
    device: DeviceType = "cpu" if start.get("device", "cpu") == "cpu" else "cuda"
    return with_device_defaults(config, device, bool(config.custom_model.class_))


def read_timed_steps(history: RunHistory) -> TimedSteps | None:
    try:
        config = config_from_dict(history.config)
        layout, batch = validate(config, own_model=bool(config.custom_model.class_))
    except ConfigError:
        return None
    ranks = tuple(rank for rank in history.ranks if rank < layout.ranks)[:MAX_RANKS]
    tables = [history.steps(rank).timed() for rank in ranks]
    for attempt in reversed(history.attempts):
        own = [table.of_attempt(attempt.number).survived() for table in tables]  # one row per step, in order
        if own and attempt.ranks == layout.ranks and (rows := common_rows(own)) is not None:
            return combine(
                attempt.number, ranks, rows, on_its_device(config, attempt.start), layout, batch, attempt.start
            )
    return None


def common_rows(tables: list[StepTable]) -> list[StepTable] | None:
    """The same steps of every table, or None if they are too few."""
    common = tables[0].step
    for table in tables[1:]:
        common = np.intersect1d(common, table.step, assume_unique=True)
    common = np.sort(common)[-MAX_STEPS:]
    if len(common) < MIN_STEPS:
        return None
    return [table.select(np.searchsorted(table.step, common)) for table in tables]


def combine(
    attempt: int,
    ranks: tuple[int, ...],
    tables: list[StepTable],
    config: RunConfig,
    layout: Layout,
    batch: Batch,
    start: Event,
) -> TimedSteps:
    local = [table.local for table in tables]
    first = tables[0]
    return TimedSteps(
        attempt,
        ranks,
        first.step,
        np.stack([table.seconds for table in tables]),
        np.nan_to_num(np.stack([table.exposed for table in tables])),
        {phase: np.stack([rank[phase] for rank in local]) for phase in local[0]},
        float(np.nan_to_num(np.median(first.buckets))),
        float(np.nan_to_num(np.median(first.message_bytes))),
        config,
        layout,
        batch,
        start,
    )
