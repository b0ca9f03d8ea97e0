"""Runs a small config as `meshwright train` does, with injected faults, and records the state of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.records.events import Event, read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.data.source import Sample, Source, is_packed
from meshwright.prover.claims import fault_environment, proof_job, supervise_quietly
from meshwright.prover.custom.subject import Subject
from meshwright.prover.shrink import open_proof_sources
from meshwright.prover.shrink.runs import changes
from meshwright.prover.state.recording import StateRecord, StateRecorder, read_records

UNDECODABLE = 40
"""One of so many samples cannot be decoded, so that counters and masks are not trivial."""


@dataclass(frozen=True)
class RecordedRun:
    """A run folder, the config that runs in it, and the recorded states of its ranks."""

    user: RunConfig
    """the config that is proven"""
    config: RunConfig
    """what runs"""
    root: Path
    subject: Subject | None = None
    """a user's model and data, in place of those of the config"""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root)

    def train(self, faults: str = "", save_at_start: bool = False) -> None:
        """Trains to the last step, from the newest checkpoint; raises RanksFailed or RestartsExhausted. With
        `save_at_start` the restored state is saved again before the first step.
        """
        recorder = StateRecorder(self.root / "states", save_at_start)
        if self.subject is not None:
            with fault_environment(faults), self.subject.unchanged():
                job = proof_job(self.config, self.subject.sources, self.folder, recorder, self.subject.custom)
                supervise_quietly(job)
            return
        sources: list[Source] = list(map(PartlyUndecodable, open_proof_sources(self.user, self.config)))
        with fault_environment(faults):
            supervise_quietly(proof_job(self.config, sources, self.folder, recorder))

    @property
    def model(self) -> str:
        """The class of a user's model; the number of blocks of the built-in one."""
        return self.subject.name if self.subject is not None else f"{self.config.model.layers} blocks"

    @property
    def changes(self) -> tuple[str, ...]:
        """Every setting that differs from the user's."""
        return changes(self.user, self.config)

    def records(self) -> dict[int, list[StateRecord]]:
        return read_records(self.root / "states")

    def events(self, *kinds: str) -> list[Event]:
        """The events of rank 0 of these kinds, in order."""
        return [event for event in read_events(self.folder.events(0)) if event["kind"] in kinds]


class PartlyUndecodable:
    """A source of which some samples cannot be decoded."""

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.packed = source, source.name, is_packed(source)

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
