"""Runs a small config as `meshwright train` does, with injected faults, and records the state of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.config import BlockSizes, RunConfig
from meshwright.data.source import Sample, Source
from meshwright.launch.job import make_job, start_ranks
from meshwright.prover.claims import NullViewer
from meshwright.prover.state.recording import StateRecord, StateRecorder, read_records
from meshwright.recover.supervisor import RunningRanks, supervise
from meshwright.telemetry.events import Event, read_events
from meshwright.telemetry.run_folder import RunFolder

BLOCKS = BlockSizes(loader_positions=7, io_bytes=512, digest_bytes=5 << 11)
"""Blocks so small that every shard has many of them, and that no tensor and no file ends where a block does."""
UNDECODABLE = 40
"""One of so many samples cannot be decoded, so that counters and masks are not trivial."""


@dataclass(frozen=True)
class RecordedRun:
    """A run folder, the config that runs in it, and the recorded states of its ranks."""

    config: RunConfig
    root: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root)

    def train(self, faults: str = "", save_at_start: bool = False) -> None:
        """Trains to the last step, from the newest checkpoint; raises RanksFailed or RestartsExhausted. With
        `save_at_start` the restored state is saved again before the first step.
        """
        job = make_job(self.config, self.folder)
        sources: list[Source] = [PartlyUndecodable(source) for source in job.sources]
        job = replace(
            job, sources=sources, block_sizes=BLOCKS, observer=StateRecorder(self.root / "states", save_at_start)
        )

        def start(attempt: int, restart: int) -> RunningRanks:
            return start_ranks(job.as_attempt(attempt, restart, fork=False))

        with environment(MESHWRIGHT_FAULT=faults):
            supervise(
                self.folder,
                self.config.launch,
                start,
                lambda _attempt: NullViewer(),
                report=lambda _text: None,
                raise_on_signal=True,
            )

    def records(self) -> dict[int, list[StateRecord]]:
        return read_records(self.root / "states")

    def events(self, *kinds: str) -> list[Event]:
        """The events of rank 0 of these kinds, in order."""
        return [event for event in read_events(self.folder.events(0)) if event["kind"] in kinds]


class PartlyUndecodable:
    """A source of which some samples cannot be decoded."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, source.name

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        if index % UNDECODABLE == UNDECODABLE - 1:
            raise ValueError("made undecodable by the prover")
        return self.source[index]

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def masked_sample(self) -> Sample:
        return self.source.masked_sample()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the duration of the context."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
