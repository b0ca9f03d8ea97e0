"""Tests of meshwright.core.data.loader: the order of the stream with every kind of worker, and bad samples."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.base.block_sizes import BlockSizes
from meshwright.base.config import Batch, BatchConfig, DataConfig, derive_batch
from meshwright.core.data import loader as loader_module
from meshwright.core.data.loader import Loader, fits_shared_memory
from meshwright.core.data.source import ConcatenatedSource, IndexableSource
from meshwright.core.data.stream import Stream
from meshwright.errors import DataError

STREAM = Stream.from_lengths(3, 12, [50], [1.0], 0.1)
INLINE = {"workers": 0}
THREADS = {"workers": 3}
PROCESSES = {"workers": 2, "worker_kind": "process"}


class IndexDataset:
    """Sample i contains i. Decoding takes a different time per sample, so that workers finish out of order."""

    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return 50

    def __getitem__(self, index):
        time.sleep((index * 7 % 5) / 2000)
        if index in self.broken:
            raise OSError("read error")
        return np.full(3, index), np.full(2, index)


def make_loader(dataset, batch: Batch, data_rank: int = 0, stream: Stream = STREAM, **data) -> Loader:
    source = ConcatenatedSource([IndexableSource(dataset, "dataset")])
    return Loader(source, stream, batch, data_rank, DataConfig(**data))


def load_ids(dataset, batch: Batch, data_rank: int, first: int, end: int, **data) -> list[list[int]]:
    steps = make_loader(dataset, batch, data_rank, **data).steps(first, end)
    return [[int(i) for micro in step for i in micro.tensors[0][:, 0]] for step in steps]


@pytest.mark.parametrize("workers", [INLINE, THREADS, PROCESSES, {"workers": 2, "prefetch": 1}])
@pytest.mark.parametrize("data_degree", [1, 2, 4])
def test_sample_order_is_independent_of_workers_and_ranks(workers, data_degree):
    batch = derive_batch(BatchConfig(12, 3 if data_degree > 1 else 4), data_degree)
    by_rank = [load_ids(IndexDataset(), batch, rank, 2, 9, **workers) for rank in range(data_degree)]
    by_step = [sum((rank[i] for rank in by_rank), []) for i in range(7)]
    assert by_step == [STREAM.step(step).tolist() for step in range(2, 9)]


@pytest.mark.parametrize("positions", [1, 7, 24])
def test_sample_order_is_independent_of_the_block_size(positions):
    batch, source = Batch(12, 4, 1, 3), ConcatenatedSource([IndexableSource(IndexDataset(), "dataset")])
    loader = Loader(source, STREAM, batch, 0, DataConfig(), BlockSizes(loader_positions=positions))
    loaded = [[int(i) for micro in step for i in micro.tensors[0][:, 0]] for step in loader.steps(2, 9)]
    assert loaded == [STREAM.step(step).tolist() for step in range(2, 9)]


@pytest.mark.parametrize("workers", [INLINE, THREADS, PROCESSES])
def test_loader_leaves_global_random_generators_unchanged(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    load_ids(IndexDataset(), Batch(12, 4, 1, 3), 0, 0, 5, **workers)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("workers", [INLINE, THREADS, PROCESSES])
def test_bad_sample_is_reported_with_source_and_id_at_its_step(workers):
    broken = int(STREAM.step(2)[5])
    loader = make_loader(IndexDataset({broken}), Batch(12, 4, 1, 3), **workers)
    for step, micro_batches in enumerate(loader.steps(0, 3)):
        bad_samples = [str(bad) for micro_batch in micro_batches for bad in micro_batch.bad_samples]
        message = f"sample {broken} (source dataset, index {broken}) cannot be decoded: OSError: read error"
        assert bad_samples == ([message] if step == 2 else [])


def test_quarantine_masks_the_bad_samples_and_no_other():
    stream = Stream.from_lengths(3, 50, [50], [1.0], 0.0)
    loader = make_loader(IndexDataset({17, 4}), Batch(50, 50, 1, 1), stream=stream, on_bad_sample="quarantine")
    [[micro_batch]] = list(loader.steps(0, 1))
    expected = [0 if i in (17, 4) else i for i in stream.step(0).tolist()]
    assert [int(i) for i in micro_batch.tensors[0][:, 0]] == expected
    assert micro_batch.valid_targets == 48 * 2
    assert {bad.sample for bad in micro_batch.bad_samples} == {17, 4}


def test_quarantine_masks_with_the_ignored_target_of_the_loss():
    loader = make_loader(IndexDataset({17, 4}), Batch(50, 50, 1, 1), on_bad_sample="quarantine")
    structure = loader.dataset.structure
    loader.dataset.structure = structure.with_count(replace(structure.count, ignored=0))
    masked = loader.dataset[np.array([17, 18], np.uint64)]
    assert (masked.tensors[1][0].tolist(), masked.valid_targets) == ([0, 0], 2)


def test_samples_of_different_shapes_are_an_error():
    ragged = [(np.ones(3), 1)] * 5 + [(np.ones(4), 1)] * 45
    with pytest.raises(DataError, match="has the shapes"):
        list(make_loader(ragged, Batch(12, 12, 1, 1)).steps(0, 4))


def test_closing_the_loader_ends_its_threads():
    steps = make_loader(IndexDataset(), Batch(12, 4, 1, 3), **THREADS).steps(0, 10**9)
    next(steps)
    steps.close()
    deadline = time.monotonic() + 10
    while (left := [t for t in threading.enumerate() if t.name.startswith("loader")]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_fits_shared_memory_compares_with_the_free_space(tmp_path):
    assert fits_shared_memory(1, str(tmp_path))
    assert not fits_shared_memory(1 << 60, str(tmp_path))
    assert not fits_shared_memory(1, str(tmp_path / "absent"))


@pytest.mark.parametrize("free", [64 << 20, 64 << 10])
def test_worker_processes_avoid_shared_memory_that_is_too_small(monkeypatch, free):
    """Three micro-batches of 4 x 256 float64 are prefetched and three used: 48 KiB, twice that with the reserve."""
    images = [(np.full(256, float(i)), i) for i in range(50)]
    monkeypatch.setattr(loader_module, "fits_shared_memory", lambda needed: 2 * needed <= free)
    loader = make_loader(images, Batch(12, 4, 1, 3), workers=1, worker_kind="process", prefetch=3)
    steps = list(loader.steps(0, 3))
    assert [[int(i) for micro in step for i in micro.tensors[1]] for step in steps] == [
        STREAM.step(step).tolist() for step in range(3)
    ]
    assert all(micro.tensors[0].is_shared() == (free > 1 << 20) for step in steps for micro in step)


def test_long_reason_of_a_bad_sample_is_cut():
    class Verbose(IndexDataset):
        def __getitem__(self, index):
            raise ValueError("x" * 1_000_000)

    [[micro_batch]] = make_loader(Verbose(), Batch(2, 2, 1, 1)).steps(0, 1)
    assert all(len(bad.reason) < 5000 for bad in micro_batch.bad_samples)
