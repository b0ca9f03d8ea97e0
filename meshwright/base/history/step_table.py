"""The recorded steps of a rank as columns of numbers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.records.events import Event
from meshwright.base.records.phases import OUTSIDE_PHASES, STEP_PHASES
from meshwright.base.records.untrusted_records import MAX_NUMBER, MAX_TIME, WARMUP_STEPS, finite_number

EXPOSED_SOURCES = ("sync phase", "host waits", "device events", "profiler")
"""How the exposed communication of a step was measured."""
WAIT_PHASES = tuple(phase for phase in STEP_PHASES if phase != "sync")
"""The phases that may contain waits for other ranks; `sync` is nothing else."""

FIELDS = (
    "step",
    "attempt",
    "seconds",
    "time",
    "begin",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "memory",
    "noise_scale",
    "loss_scale",
    "major_faults",
    "alloc_retries",
)
TABLES = ("phases", "waits", "outside", "communication", "pipeline", "experts")
"""The parts of a step record that are objects."""
COLUMNS = (
    *FIELDS,
    "exposed",
    "source",
    "buckets",
    "message_bytes",
    "live",
    "idle",
    "imbalance",
    "dropped",
    "skipped",
    "counted",
    "profiled",
    *(f"phases.{phase}" for phase in STEP_PHASES),
    *(f"waits.{phase}" for phase in WAIT_PHASES),
    *(f"outside.{phase}" for phase in OUTSIDE_PHASES),
)
INDEX = {name: index for index, name in enumerate(COLUMNS)}
FLAGS = ("skipped", "counted", "profiled")

Column = NDArray[np.float64]
RECENT_STEPS = 50
"""How many of the newest steps the headline signals and the figures of ranks are averaged over."""


class FloatColumn:
    """A column of numbers; NaN is a value that was not recorded."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.index = INDEX[name]

    def __get__(self, table: StepTable, owner: type | None = None) -> Column:
        return table.rows[:, self.index]


class IntegerColumn(FloatColumn):
    """A column of integers, which every row has."""

    def __get__(self, table: StepTable, owner: type | None = None) -> NDArray[np.int64]:  # type: ignore[override]
        return super().__get__(table, owner).astype(np.int64)


class FlagColumn(FloatColumn):
    """A column of flags."""

    def __get__(self, table: StepTable, owner: type | None = None) -> NDArray[np.bool_]:  # type: ignore[override]
        return super().__get__(table, owner) > 0


@dataclass(frozen=True, eq=False)
class StepTable:
    """Columns of equal length, in the order of recording. A step that several attempts completed has several rows."""

    rows: NDArray[np.float64]
    """one row per step, one column per entry of COLUMNS"""

    step = IntegerColumn()
    attempt = IntegerColumn()
    time = FloatColumn()
    """when the record was written, in Unix seconds"""
    begin = FloatColumn()
    """when the first phase began, in Unix seconds"""
    seconds = FloatColumn()
    loss = FloatColumn()
    grad_norm = FloatColumn()
    lr = FloatColumn()
    tokens = FloatColumn()
    samples = FloatColumn()
    memory = FloatColumn()
    noise_scale = FloatColumn()
    loss_scale = FloatColumn()
    major_faults = FloatColumn()
    """page faults that read from disk; NaN if there were none"""
    alloc_retries = FloatColumn()
    """retries of the CUDA allocator; NaN if there were none"""
    exposed = FloatColumn()
    """seconds of exposed communication"""
    source = FloatColumn()
    """how it was measured: an index of EXPOSED_SOURCES"""
    buckets = FloatColumn()
    message_bytes = FloatColumn()
    live = FloatColumn()
    """peak number of micro-batches in flight"""
    idle = FloatColumn()
    """share of the passes in which a pipeline rank waited"""
    imbalance = FloatColumn()
    """largest load of an expert as a multiple of an even share"""
    dropped = FloatColumn()
    """tokens that the capacity of experts dropped"""
    skipped = FlagColumn()
    counted = FlagColumn()
    profiled = FlagColumn()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Column:
        """The column of a name in COLUMNS, such as "loss" or "phases.forward"."""
        return self.rows[:, INDEX[name]]

    @property
    def phases(self) -> dict[str, Column]:
        """The seconds of every phase of the step."""
        return {phase: self.column(f"phases.{phase}") for phase in STEP_PHASES}

    @property
    def waits(self) -> dict[str, Column]:
        """The seconds of every phase in which the training thread waited for other ranks inside a collective."""
        return {phase: self.column(f"waits.{phase}") for phase in WAIT_PHASES}

    @property
    def outside(self) -> dict[str, Column]:
        """The seconds between the previous step and this one, by what the training thread did."""
        return {phase: self.column(f"outside.{phase}") for phase in OUTSIDE_PHASES}

    @property
    def local(self) -> dict[str, Column]:
        """The seconds of every phase but `sync` that the rank spent by itself, not waiting for others."""
        waits = self.waits
        return {
            phase: np.maximum(0.0, np.nan_to_num(seconds) - np.nan_to_num(waits[phase]))
            for phase, seconds in self.phases.items()
            if phase != "sync"
        }

    @property
    def local_seconds(self) -> Column:
        """The local time of every step: the seconds of all phases that the rank spent by itself."""
        return sum(self.local.values(), np.zeros(len(self)))

    @property
    def end(self) -> Column:
        """When the last phase ended, in Unix seconds."""
        return self.begin + self.seconds

    @property
    def exposed_source(self) -> str:
        """How the exposed communication of the newest step was measured."""
        known = self.source[~np.isnan(self.source)]
        return EXPOSED_SOURCES[int(known[-1])] if len(known) else EXPOSED_SOURCES[0]

    def select(self, rows: Any) -> StepTable:
        """The rows of a slice, mask or list of indices."""
        return StepTable(self.rows[rows])

    @property
    def multiplicity(self) -> NDArray[np.int64]:
        """How many steps each row stands for: itself, and those before it whose records are missing or not kept."""
        same_attempt = np.diff(self.attempt) == 0
        missing = np.where(same_attempt, np.maximum(0, np.diff(self.step) - 1), 0)
        return 1 + np.concatenate([np.zeros(min(1, len(self)), np.int64), missing])

    def of_attempt(self, attempt: int) -> StepTable:
        return self.select(self.attempt == attempt)

    def survived(self) -> StepTable:
        """One row per step, in order: the last attempt that completed it counts."""
        steps = self.step[::-1]
        _, first = np.unique(steps, return_index=True)
        return self.select(len(steps) - 1 - first)

    def timed(self) -> StepTable:
        """The steps whose duration is typical: without counters or profiler, and not the first two of an attempt."""
        if not len(self):
            return self
        attempts, inverse = np.unique(self.attempt, return_inverse=True)
        first = np.full(len(attempts), np.iinfo(np.int64).max)
        np.minimum.at(first, inverse, self.step)
        return self.select(~self.counted & ~self.profiled & (self.step >= first[inverse] + WARMUP_STEPS))

    def recent(self) -> StepTable:
        """The newest steps of the newest attempt, without its first one if there are others."""
        rows = self._newest_of_attempt(RECENT_STEPS + 1)
        return rows.select(slice(1, None)) if len(rows) > 1 else rows

    def recent_timed(self) -> StepTable:
        """The newest timed steps of the newest attempt; its newest steps if none was timed."""
        timed = self._newest_of_attempt(2 * RECENT_STEPS).timed().select(slice(-RECENT_STEPS, None))
        return timed if len(timed) else self.recent()

    def _newest_of_attempt(self, count: int) -> StepTable:
        rows = self.select(slice(-count, None))
        return rows.of_attempt(rows.attempt[-1]) if len(rows) else rows

    def decimated(self, points: int) -> DecimatedSteps:
        """At most `points` bins of equally many rows, with the smallest, mean and largest value of every column."""
        starts = np.unique(np.linspace(0, len(self), max(1, points), endpoint=False).astype(np.int64))
        if not len(self):
            return DecimatedSteps(self, self, self)
        counts = np.add.reduceat(~np.isnan(self.rows), starts, axis=0)
        sums = np.add.reduceat(np.nan_to_num(self.rows), starts, axis=0)
        mean = np.divide(sums, counts, out=np.full(sums.shape, nan), where=counts > 0)
        low = np.fmin.reduceat(self.rows, starts, axis=0)
        return DecimatedSteps(StepTable(low), StepTable(mean), StepTable(np.fmax.reduceat(self.rows, starts, axis=0)))


@dataclass(frozen=True, eq=False)
class DecimatedSteps:
    """Steps in bins: each table has one row per bin."""

    low: StepTable
    mean: StepTable
    high: StepTable

    @property
    def step(self) -> NDArray[np.int64]:
        """The first step of every bin."""
        return self.low.step

    def __len__(self) -> int:
        return len(self.low)


MAX_ROWS = 1 << 18
"""Steps of one rank that are kept at most."""


class StepRows:
    """Rows that are appended as step records. Beyond `max_rows`, the newer half remains, and one in two of the others:
    what a run that goes on for ever keeps in memory is bounded.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: NDArray[np.float64] = np.empty((256, len(COLUMNS)))
        self._count = 0
        self._pending: list[list[Any]] = []
        self._new: list[NDArray[np.float64]] = []

    def append(self, event: Event) -> None:
        """Appends a step record; one without the number, attempt or duration of a step is left out."""
        self._pending.append(raw_row(event))
        if len(self._pending) >= CHUNK:
            self._convert()

    def table(self) -> StepTable:
        """The rows so far; rows that are appended later are not in it."""
        self._convert()
        return StepTable(self._rows[: self._count])

    def take_new(self) -> StepTable:
        """The rows that were appended since the last call."""
        self._convert()
        new, self._new = self._new, []
        return StepTable(np.concatenate([np.empty((0, len(COLUMNS))), *new]))

    def _convert(self) -> None:
        if not self._pending:
            return
        rows, self._pending = clean_rows(self._pending), []
        self._new.append(rows)
        while self._count + len(rows) > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._count : self._count + len(rows)] = rows
        self._count += len(rows)
        while self._count > self._max_rows:
            newer = self._count - self._max_rows // 2
            kept = np.concatenate([self._rows[:newer:2], self._rows[newer : self._count]])
            self._rows, self._count = kept, len(kept)


CHUNK = 512
"""Records that are converted at once."""
MIN_SECONDS = 1e-9
"""No step is shorter: the clock counts nanoseconds."""
MAX_SECONDS = 1e6
"""A longer step is not a step."""
NO_TABLE: dict[str, Any] = {}
SOURCE_NUMBERS = {source: number for number, source in enumerate(EXPOSED_SOURCES)}


def raw_row(event: Event) -> list[Any]:
    """The values of a step record in the order of COLUMNS, of any type."""
    phases, waits, outside, communication, pipeline, experts = (
        value if type(value := event.get(name)) is dict else NO_TABLE for name in TABLES
    )
    source = communication.get("exposed_source")
    return [
        *map(event.get, FIELDS),
        communication.get("exposed_seconds"),
        SOURCE_NUMBERS.get(source) if type(source) is str else None,
        *map(communication.get, ("buckets", "message_bytes")),
        *map(pipeline.get, ("live", "idle")),
        *map(experts.get, ("imbalance", "dropped")),
        *map(event.get, FLAGS),
        *map(phases.get, STEP_PHASES),
        *map(waits.get, WAIT_PHASES),
        *map(outside.get, OUTSIDE_PHASES),
    ]


def clean_rows(raw: list[list[Any]]) -> NDArray[np.float64]:
    """Rows of numbers; what is not a finite number is NaN, and rows that are no steps are left out."""
    try:
        rows = np.array(raw, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        rows = np.array([[finite_or_nan(value) for value in row] for row in raw], dtype=np.float64)
    rows[~(np.abs(rows) < MAX_NUMBER)] = nan
    for name in ("time", "begin"):
        stamps = rows[:, INDEX[name]]
        stamps[~((stamps >= 0) & (stamps < MAX_TIME))] = nan
    seconds, begin, exposed = rows[:, INDEX["seconds"]], rows[:, INDEX["begin"]], rows[:, INDEX["exposed"]]
    # A record without `begin` is written when the step ends.
    np.copyto(begin, rows[:, INDEX["time"]] - seconds, where=np.isnan(begin))
    np.copyto(exposed, rows[:, INDEX["phases.sync"]], where=np.isnan(exposed))
    valid = (seconds >= MIN_SECONDS) & (seconds < MAX_SECONDS)
    for name in ("step", "attempt"):
        numbers = rows[:, INDEX[name]]
        valid &= (numbers >= 0) & (numbers < 1 << 53) & (numbers == np.floor(numbers))
    return rows[valid]


def finite_or_nan(value: Any) -> float:
    """A finite number, or NaN."""
    number = True if value is True else finite_number(value)
    return nan if number is None else number
