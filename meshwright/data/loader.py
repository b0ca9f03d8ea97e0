"""Micro-batches of one rank in the order of the stream, prefetched by threads or processes that cannot change it.

The order is fixed before any worker sees it: workers decode lists of ids and the results are taken in the order
of the lists. Nothing here reads or advances a global random generator.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from meshwright.config import IGNORE_INDEX, Batch, DataConfig
from meshwright.data.permutation import Positions
from meshwright.data.source import ConcatenatedSource
from meshwright.data.stream import Stream
from meshwright.errors import DataError
from meshwright.parent_death import exit_with_parent

POSITIONS_PER_CALL = 4096
"""Positions permuted in one call: a vectorised permutation costs the same for sixteen positions as for a thousand."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be decoded, and why."""

    sample: int
    source: str
    index: int
    reason: str

    def __str__(self) -> str:
        return f"sample {self.sample} (source {self.source}, index {self.index}) cannot be decoded: {self.reason}"


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass (targets last), how much counts in them, and what could not be decoded."""

    tensors: tuple[Tensor, ...]
    valid_targets: int
    bad_samples: tuple[BadSample, ...] = ()


class MicroBatchDataset(Dataset[MicroBatch]):
    """ids -> MicroBatch. A sample that cannot be decoded comes back as a fact, never as an exception out of its
    turn.
    """

    def __init__(self, source: ConcatenatedSource, quarantine: bool) -> None:
        self.source, self.quarantine = source, quarantine

    def __getitem__(self, ids: Positions) -> MicroBatch:
        samples, bad = [], []
        for sample in map(int, ids):
            try:
                parts = self.source[sample]
                if strange := [part.dtype for part in parts if part.dtype.kind not in "biuf"]:
                    raise ValueError(f"it holds {strange[0]}, not numbers")
                samples.append(parts)
            except Exception as error:  # noqa: BLE001  whatever a user's source raises is named by its sample
                source, index = self.source.locate(sample)
                bad.append(BadSample(sample, source.name, index, f"{type(error).__name__}: {error}"))
                samples.append(())
        if bad and not self.quarantine:
            return MicroBatch((), 0, tuple(bad))
        blank = self.source.masked_sample() if bad else ()
        whole = [sample or blank for sample in samples]
        first = [part.shape for part in whole[0]]
        for sample, parts in zip(map(int, ids), whole, strict=True):
            if (shapes := [part.shape for part in parts]) != first:
                what = f"sample {sample} has the shapes {shapes}, sample {int(ids[0])} has {first}"
                raise DataError(what, "pad samples to one shape")
        tensors = tuple(torch.from_numpy(np.stack(column)) for column in zip(*whole, strict=True))
        return MicroBatch(tensors, count_valid_targets(tensors[-1]), tuple(bad))


def count_valid_targets(targets: Tensor) -> int:
    """What the loss is divided by: integer targets that are not masked; for other targets the samples."""
    return len(targets) if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class ExitWithParent:
    """A worker that ends when its rank does, however that ends."""

    parent: int

    def __call__(self, _worker: int) -> None:
        exit_with_parent(self.parent)


class Loader:
    """The micro-batches of one data coordinate from any step on."""

    def __init__(
        self, source: ConcatenatedSource, stream: Stream, batch: Batch, coordinate: int, config: DataConfig
    ) -> None:
        self.stream, self.batch, self.coordinate, self.config = stream, batch, coordinate, config
        self.decoder = MicroBatchDataset(source, config.on_bad_sample == "quarantine")

    def steps(self, first: int, end: int) -> Iterator[list[MicroBatch]]:
        """For each step of [first, end), its micro-batches."""
        with closing(self._decoded(self._ids(first, end))) as batches:
            for _ in range(first, end):
                yield list(islice(batches, self.batch.accumulation))

    def first(self) -> MicroBatch:
        """The first micro-batch of all, decoded apart."""
        return self.decoder[next(self._ids(0, 1))]

    def _ids(self, first: int, end: int) -> Iterator[Positions]:
        """The ids of each micro-batch, permuted many steps at a time."""
        stride = max(1, POSITIONS_PER_CALL // self.batch.local)
        own = np.arange(self.batch.local, dtype=np.uint64) + np.uint64(self.coordinate * self.batch.local)
        for start in range(first, end, stride):
            steps = np.arange(start, min(start + stride, end), dtype=np.uint64)
            ids = self.stream.sample_ids((steps[:, None] * np.uint64(self.batch.global_) + own).ravel())
            yield from ids.reshape(-1, self.batch.micro)

    def _decoded(self, ids: Iterator[Positions]) -> Generator[MicroBatch, None, None]:
        workers, ahead = self.config.workers, self.config.prefetch
        if workers == 0:
            yield from map(self.decoder.__getitem__, ids)
        elif self.config.worker_kind == "process":
            # torch's DataLoader gives results in the order of its sampler, whatever its workers' order.
            yield from DataLoader(
                self.decoder,
                sampler=ids,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=-(-ahead // workers),
                multiprocessing_context="fork",
                generator=torch.Generator(),
                worker_init_fn=ExitWithParent(os.getpid()),
            )
        else:
            yield from self._by_threads(ids, workers, ahead)

    def _by_threads(self, ids: Iterator[Positions], workers: int, ahead: int) -> Iterator[MicroBatch]:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
        try:
            waiting: deque[Future[MicroBatch]] = deque(
                pool.submit(self.decoder.__getitem__, some) for some in islice(ids, ahead)
            )
            while waiting:
                done = waiting.popleft().result()
                waiting.extend(pool.submit(self.decoder.__getitem__, some) for some in islice(ids, 1))
                yield done
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
