"""Loads the micro-batches of one rank in the order of the stream, prefetched by threads or processes.

The order is fixed before a worker sees it: workers decode lists of sample ids, and the results are consumed in the
order of the lists. The loader neither reads nor advances a global random generator.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.config import IGNORE_INDEX, Batch, DataConfig
from meshwright.base.parent_death import exit_with_parent
from meshwright.core.data.batch_structure import BatchStructure, CountRule
from meshwright.core.data.permutation import Positions
from meshwright.core.data.source import (
    Collate,
    ConcatenatedSource,
    collate_samples,
    first_sample,
    is_packed,
    masked_batch,
)
from meshwright.core.data.stream import Stream
from meshwright.errors import DataError, describe_exception

TOKENS_AND_LABELS = BatchStructure.of_tuple(2)
"""The structure of the samples of the built-in models."""
WITH_DOCUMENTS = replace(BatchStructure.of_tuple(3), targets=(1,), count=CountRule("valid", 1))
"""The structure of packed samples of the built-in models: (tokens, labels, documents)."""

SHARED_MEMORY = "/dev/shm"
"""The file system in which torch places the tensors that a worker process sends to the training process."""

MAX_RANKS_PER_HOST = 8
"""Ranks that are assumed to use the shared memory of one host at the same time, at most."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be decoded, and the reason."""

    sample: int
    source: str
    index: int
    reason: str

    def __str__(self) -> str:
        return f"sample {self.sample} (source {self.source}, index {self.index}) cannot be decoded: {self.reason}"


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass."""

    tensors: tuple[Tensor, ...]
    """The entries of the batch as `BatchStructure` flattens them; for a tuple the inputs, then the target."""
    valid_targets: int
    """The number of targets that count in the loss."""
    bad_samples: tuple[BadSample, ...] = ()
    """The samples that could not be decoded."""


class MicroBatchDataset(Dataset[MicroBatch]):
    """Sample ids -> MicroBatch. A sample that cannot be decoded is returned as a `BadSample`: an exception in a worker
    would reach the training process before its turn in the stream.
    """

    def __init__(
        self,
        source: ConcatenatedSource,
        quarantine: bool,
        structure: BatchStructure | None = None,
        collate: Collate | None = None,
    ) -> None:
        """Without a `structure`, the samples are those of built-in models."""
        self.source, self.quarantine = source, quarantine
        self.structure = structure or (WITH_DOCUMENTS if is_packed(source) else TOKENS_AND_LABELS)
        self.collate = collate

    def __getitem__(self, ids: Positions) -> MicroBatch:
        decoded: list[Any] = []
        bad_samples = []
        for sample in map(int, ids):
            try:
                decoded.append(self._decode(sample))
            except Exception as error:  # noqa: BLE001  a user's source may raise anything
                source, index = self.source.locate(sample)
                bad_samples.append(
                    BadSample(sample, source.name, index, f"{type(error).__name__}: {describe_exception(error)}")
                )
                decoded.append(None)
        if bad_samples and not self.quarantine:
            return MicroBatch((), 0, tuple(bad_samples))
        arrays = self._stack(ids, decoded) if self.collate is None else self._collate(ids, decoded, self.collate)
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        return MicroBatch(tensors, count_targets(self.structure.count, tensors), tuple(bad_samples))

    def _decode(self, sample: int) -> Any:
        """Returns a sample as flat arrays, or as the source has it where a collate function takes it."""
        value = self.source[sample]
        return value if self.collate is not None else self._arrays(value)

    def _arrays(self, value: Any) -> tuple[NDArray[Any], ...]:
        arrays = tuple(np.asarray(entry) for entry in self.structure.flatten(value))
        for name, array in zip(self.structure.names, arrays, strict=True):
            if array.dtype.kind not in "biuf":
                raise ValueError(f"entry {name!r} has dtype {array.dtype}, expected numbers")
        return arrays

    def _masked_arrays(self) -> tuple[NDArray[Any], ...]:
        """Returns a sample without valid targets."""
        rule, arrays = self.structure.count, list(self._arrays(self.source.masked_sample()))
        if rule is not None and rule.ignored != IGNORE_INDEX:
            for target in self.structure.targets:
                arrays[target] = np.full_like(arrays[target], rule.ignored)
        return tuple(arrays)

    def _stack(self, ids: Positions, decoded: list[Any]) -> list[NDArray[Any]]:
        """Stacks samples of equal shapes; a sample that could not be decoded is replaced by a masked one."""
        masked = self._masked_arrays() if any(sample is None for sample in decoded) else ()
        rows: list[tuple[NDArray[Any], ...]] = [masked if arrays is None else arrays for arrays in decoded]
        expected = [array.shape for array in rows[0]]
        for sample, arrays in zip(map(int, ids), rows, strict=True):
            if (shapes := [array.shape for array in arrays]) != expected:
                raise DataError(
                    f"sample {sample} has the shapes {shapes}, sample {int(ids[0])} has {expected}",
                    "try to pad all samples to one shape, or train(..., collate=...) with a function that pads",
                )
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def _collate(self, ids: Positions, decoded: list[Any], collate: Collate) -> list[NDArray[Any]]:
        """Collates the samples that could be decoded; if there are none, the first sample with masked targets."""
        samples = [sample for sample in decoded if sample is not None]
        where = f"the samples {', '.join(map(str, ids))}"
        batch = collate_samples(collate, samples or [first_sample(self.source)], where)
        if not samples:
            batch = masked_batch(batch, self.structure, self.source.name)
        try:
            return [np.ascontiguousarray(array) for array in self._arrays(batch)]
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the batch that collate made of {where}: {error}", "expected the same entries in every batch"
            ) from None


class NumpyBatchDataset(Dataset[Any]):
    """The same micro-batches with numpy arrays for tensors: worker processes then send them through a pipe, where
    tensors would be placed in shared memory.
    """

    def __init__(self, dataset: MicroBatchDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, ids: Positions) -> tuple[MicroBatch, list[np.ndarray[Any, Any]]]:
        batch = self.dataset[ids]
        return replace(batch, tensors=()), [tensor.numpy() for tensor in batch.tensors]


def count_targets(rule: CountRule | None, tensors: Sequence[Tensor]) -> int:
    """The number that the loss is divided by; 0 where it is not known yet."""
    return int(target_count(rule, tensors)) if rule is not None else 0


def target_count(rule: CountRule, tensors: Sequence[Tensor]) -> Tensor:
    """The number of valid targets as a tensor on the device of the batch."""
    entry = tensors[rule.entry]
    if rule.kind == "samples" or (rule.kind != "nonzero" and entry.is_floating_point()):
        return torch.tensor(len(entry), device=entry.device)
    if rule.kind == "nonzero":
        return (entry != 0).sum()
    return ((entry[..., 1:] if rule.kind == "shifted" else entry) != rule.ignored).sum()


def fits_shared_memory(needed_bytes: int, path: str = SHARED_MEMORY) -> bool:
    """Whether shared memory has room for `needed_bytes`, with as much again to spare. A container may have only 64 MB,
    the default of Docker, and a process that exceeds it ends with SIGBUS.
    """
    try:
        space = os.statvfs(path)
    except OSError:
        return False
    return 2 * needed_bytes <= space.f_bavail * space.f_frsize


@dataclass(frozen=True)
class ExitWithParent:
    """Worker initialization: the worker process exits when the process of its rank exits, also after SIGKILL."""

    parent: int

    def __call__(self, _worker: int) -> None:
        exit_with_parent(self.parent)


class Loader:
    """The micro-batches of one data-parallel rank, from any step."""

    def __init__(
        self,
        source: ConcatenatedSource,
        stream: Stream,
        batch: Batch,
        data_rank: int,
        config: DataConfig,
        block_sizes: BlockSizes = BLOCK_SIZES,
        structure: BatchStructure | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.stream, self.batch, self.data_rank, self.config = stream, batch, data_rank, config
        self.block_sizes = block_sizes
        self.dataset = MicroBatchDataset(source, config.on_bad_sample == "quarantine", structure, collate)

    def steps(self, first: int, end: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step in [first, end)."""
        with closing(self._micro_batches(self._micro_batch_ids(first, end))) as batches:
            for _ in range(first, end):
                yield list(islice(batches, self.batch.accumulation))

    def first(self) -> MicroBatch:
        """The first micro-batch of step 0, decoded in the calling process."""
        return self.dataset[next(self._micro_batch_ids(0, 1))]

    def _micro_batch_ids(self, first: int, end: int) -> Iterator[Positions]:
        """The sample ids of each micro-batch, permuted for many steps at a time."""
        steps_per_call = max(1, self.block_sizes.loader_positions // self.batch.local)
        local = np.arange(self.batch.local, dtype=np.uint64) + np.uint64(self.data_rank * self.batch.local)
        for start in range(first, end, steps_per_call):
            steps = np.arange(start, min(start + steps_per_call, end), dtype=np.uint64)
            ids = self.stream.sample_ids((steps[:, None] * np.uint64(self.batch.global_) + local).ravel())
            yield from ids.reshape(-1, self.batch.micro)

    def _micro_batches(self, ids: Iterator[Positions]) -> Generator[MicroBatch, None, None]:
        if self.config.workers == 0:
            yield from map(self.dataset.__getitem__, ids)
        elif self.config.worker_kind == "thread":
            yield from self._load_by_threads(ids)
        elif fits_shared_memory(self._prefetched_bytes() * min(self.batch.replicas, MAX_RANKS_PER_HOST)):
            yield from self._load_by_processes(self.dataset, ids)
        else:
            for batch, arrays in self._load_by_processes(NumpyBatchDataset(self.dataset), ids):
                yield replace(batch, tensors=tuple(torch.from_numpy(array) for array in arrays))

    @property
    def _prefetch_per_worker(self) -> int:
        return -(-self.config.prefetch // self.config.workers)

    def _prefetched_bytes(self) -> int:
        """The bytes of all micro-batches that worker processes keep ready and that a step uses at the same time."""
        micro_batches = self._prefetch_per_worker * self.config.workers + self.batch.accumulation
        return micro_batches * sum(tensor.nbytes for tensor in self.first().tensors)

    def _load_by_processes(self, dataset: Dataset[Any], ids: Iterator[Positions]) -> Iterator[Any]:
        # torch's DataLoader returns batches in the order of its sampler, in whatever order the workers finish.
        yield from DataLoader(
            dataset,
            sampler=ids,
            batch_size=None,
            collate_fn=lambda batch: batch,  # the default converts numpy arrays to tensors in the worker
            num_workers=self.config.workers,
            prefetch_factor=self._prefetch_per_worker,
            multiprocessing_context="fork",
            generator=torch.Generator(),
            worker_init_fn=ExitWithParent(os.getpid()),
        )

    def _load_by_threads(self, ids: Iterator[Positions]) -> Iterator[MicroBatch]:
        pool = ThreadPoolExecutor(self.config.workers, thread_name_prefix="loader")
        try:
            pending: deque[Future[MicroBatch]] = deque(
                pool.submit(self.dataset.__getitem__, batch_ids) for batch_ids in islice(ids, self.config.prefetch)
            )
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(self.dataset.__getitem__, batch_ids) for batch_ids in islice(ids, 1))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
