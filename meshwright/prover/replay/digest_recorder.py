"""Records digests of every step on the ranks of a replay: samples, loss, gradients and parameters, unsharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from meshwright.base.records.events import Event
from meshwright.base.topology.layout import Layout
from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job, TrainingObserver
from meshwright.core.trainer.loop import Training
from meshwright.errors import NumericsError, PeerError
from meshwright.prover.replay.run_difference import RunDigests, StepDigests


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a replay writes to a file: the gradient or the parameter of a name, of one step."""

    name: str
    gradient: bool
    """whether it is the gradient; otherwise the parameter"""
    number: int
    """the step of a gradient; of a parameter, the number of completed steps"""
    path: Path

    @property
    def key(self) -> tuple[str, bool, int]:
        return self.name, self.gradient, self.number


@dataclass
class RankDigests:
    """What one rank returns."""

    data_coordinate: int
    parameters: dict[int, dict[str, str]] = field(default_factory=dict)
    gradients: dict[int, dict[str, str]] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)
    """step -> a digest of every sample of this data-parallel rank"""
    records: list[Event] = field(default_factory=list)


class DigestRecorder(TrainingObserver):
    """Digests every step. Every rank gathers every tensor; those of one replica digest them."""

    def __init__(self, saved: SavedTensor | None = None) -> None:
        self.saved = saved

    def on_start(self, training: Training) -> None:
        self.training = training
        layout, rank = training.job.layout, training.world.rank
        self.digests = RankDigests(layout.data_coordinate(rank))
        self.of_first_replica, self.reads_first = reports(layout, rank)
        self._parameters(training.done)

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:
        if self.reads_first:
            self.digests.samples[step] = [digest for batch in batches for digest in sample_digests(batch.tensors)]
        named = self.training.parallel_model.gradients().items()
        self.digests.gradients[step] = self._digest(named, step, gradient=True)

    def on_step(self, outcome: object) -> None:  # noqa: ARG002
        self._parameters(self.training.done + 1)

    def _parameters(self, done: int) -> None:
        self.digests.parameters[done] = self._digest(self.training.parameters.items(), done, gradient=False)

    def _digest(self, named: Iterable[tuple[str, Tensor]], number: int, gradient: bool) -> dict[str, str]:
        found = {}
        for name, tensor in named:
            values = full_tensor(tensor)
            if not self.of_first_replica:
                continue
            flat = values.cpu().contiguous().reshape(-1)
            found[name] = xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().tobytes())
            if self.saved is not None and (name, gradient, number) == self.saved.key:
                np.save(self.saved.path, flat.double().numpy())
        return found


def reports(layout: Layout, rank: int) -> tuple[bool, bool]:
    """(whether this rank digests its tensors: it is in the first replica; whether it digests the samples of its data
    coordinate: it is the first rank that reads them).
    """
    coordinates = layout.coordinates(rank)
    first = all(value == 0 for axis, value in coordinates.items() if axis != "pipeline")
    return first, layout.counts_tokens(rank)


def sample_digests(tensors: tuple[Tensor, ...]) -> Iterator[str]:
    """A digest of every row of a micro-batch; one of the whole micro-batch if its tensors have different lengths."""
    arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    rows = [[array[index] for array in arrays] for index in range(lengths.pop())] if len(lengths) == 1 else [arrays]
    for row in rows:
        digest = xxhash.xxh3_128()
        for array in row:
            digest.update(np.ascontiguousarray(array).tobytes())
        yield digest.hexdigest()


def digest_rank(world: World, job: Job, last: int, saved: SavedTensor | None) -> RankDigests:
    """Trains on this rank up to and including step `last`, and digests every step."""
    records: list[Event] = []
    listener = lambda event: records.append(event) if event["kind"] == "step" else None  # noqa: E731
    recorder = DigestRecorder(saved)
    training = Training(replace(job, observer=recorder, listener=listener if world.rank == 0 else None), world)
    try:
        with suppress(NumericsError, PeerError):  # a step that is not finite is on record, and has changed nothing
            while training.done <= last:
                training.run_step()
            training.recorder.flush()
        recorder.digests.records = records
        return recorder.digests
    finally:
        training.signals.close()
        training.saver.close()
        training.log.close()


def join_digests(ranks: list[RankDigests], records: dict[int, Event]) -> RunDigests:
    """The digests of all ranks: pipeline ranks have different parameters, data-parallel ranks different samples."""
    parameters: dict[int, dict[str, str]] = {}
    gradients: dict[int, dict[str, str]] = {}
    samples: dict[int, list[str]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.data_coordinate):
        for done, found in rank.parameters.items():
            parameters.setdefault(done, {}).update(found)
        for step, found in rank.gradients.items():
            gradients.setdefault(step, {}).update(found)
        for step, of_rank in rank.samples.items():
            samples.setdefault(step, []).extend(of_rank)
    steps = {
        step: StepDigests(tuple(samples.get(step, ())), records[step]["loss"], found)
        for step, found in gradients.items()
        if step in records
    }
    return RunDigests(parameters, steps, records)
