"""Profiles configured steps with torch.profiler and writes one Kineto trace per rank and range of steps."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.base.config import ProfileConfig
from meshwright.base.records.events import Event, EventLog
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.spans import SpanLog
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import recorded_collectives

COLUMNS = ("step", "group", "sequence", "collective", "time", "elements")
"""Columns of the collectives in the metadata of a profile; `time` is in Unix microseconds."""
COMPRESSION = 4


class StepProfiler:
    """Profiles the ranges of steps that no earlier attempt has profiled on all ranks.

    Args:
        config: the ranges of steps.
        folder: the run folder.
        attempt: the number of the attempt.
        world: this rank.
        metadata: the `rank` record of the spans, which becomes part of the metadata.
        axes: returns the axis of every process group, by name.
        spans: where the time is recorded that starting and writing a profile takes.
        log: where the `profile` event is written.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: RunFolder,
        attempt: int,
        world: World,
        metadata: Event,
        axes: Callable[[], dict[str, str]],
        spans: SpanLog,
        log: EventLog,
    ) -> None:
        self._config, self._folder, self._attempt, self._world = config, folder, attempt, world
        self._metadata, self._axes, self._spans, self.log = metadata, axes, spans, log
        self._ranges = self._missing_ranges(config.ranges())
        self._profile: profile | None = None
        self._steps = range(0)
        self._collectives: list[tuple[Any, ...]] = []
        self._incomplete: list[int] = []

    def _missing_ranges(self, ranges: list[range]) -> list[range]:
        if not ranges:
            return []
        done = [bool(list(self._folder.profiles(self._world.rank, steps))) for steps in ranges]
        by_rank = self._world.all_gather_ints(*done, name="profiled steps")
        return [steps for steps, *ranks in zip(ranges, *by_rank, strict=True) if not all(ranks)]

    @contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """The context of a step; yields whether it is profiled. The last step of a range is followed by its profile."""
        steps = next((steps for steps in self._ranges if step in steps), None)
        if steps is None:
            yield False
            return
        if self._profile is None:
            self._start(step, steps)
        begin = time.time_ns()
        with record_function(f"ProfilerStep#{step}"):
            yield True
        rows, complete = collectives_since(begin, step)
        self._collectives += rows
        if not complete:
            self._incomplete.append(step)
        if step + 1 == steps.stop:
            self.close()

    def _start(self, step: int, steps: range) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports on standard error what it does
        self._steps, self._collectives, self._incomplete = steps, [], []
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with self._spans.span("profile", step):
            self._profile = profile(activities=activities, record_shapes=self._config.shapes)
            self._profile.start()

    def close(self) -> None:
        """Ends the profile and writes it, if one is in progress. One that cannot be written does not end the run."""
        ended, self._profile = self._profile, None
        if ended is None:
            return
        with self._spans.span("profile", self._steps.stop):
            result: Event
            try:
                ended.add_metadata_json("meshwright", json.dumps(self._described()))
                ended.stop()
                result = self._write(ended)
            except (OSError, RuntimeError) as error:
                result = {"message": f"the profile cannot be written: {error}"}
            self.log.write("profile", step=self._steps.start, steps=len(self._steps), **result)

    def _described(self) -> Event:
        return self._metadata | {
            "attempt": self._attempt,
            "steps": [self._steps.start, self._steps.stop],
            "axes": self._axes(),
            "columns": COLUMNS,
            "collectives": self._collectives,
            "incomplete_steps": self._incomplete,
        }

    def _write(self, ended: profile) -> Event:
        path = self._folder.profile(self._world.rank, self._steps, self._attempt)
        text, compressed = (path.with_name(f".{path.name}.{os.getpid()}.{part}") for part in ("text", "gz"))
        try:
            ended.export_chrome_trace(str(text))
            with text.open("rb") as source, gzip.open(compressed, "xb", compresslevel=COMPRESSION) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(compressed, path)
        finally:
            for file in (text, compressed):
                with suppress(OSError):
                    file.unlink()
        return {"file": str(path.relative_to(self._folder.root)), "bytes": path.stat().st_size}


def collectives_since(begin: int, step: int) -> tuple[list[tuple[Any, ...]], bool]:
    """Returns the rows of the collectives of this process since `begin` (Unix nanoseconds), and whether these are all:
    the recorder keeps the newest 2,000, or TORCH_FR_BUFFER_SIZE.
    """
    if not torch.distributed.is_initialized():
        return [], True
    entries = recorded_collectives()
    complete = not entries or entries[0].get("record_id", 0) == 0 or entries[0]["time_created_ns"] < begin
    rows = [
        (
            step,
            entry["process_group"][0],
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
            entry["time_created_ns"] // 1000,
            sum(torch.Size(size).numel() for size in entry["input_sizes"]),
        )
        for entry in entries
        if entry["time_created_ns"] >= begin and not entry.get("is_p2p")
    ]
    return rows, complete
