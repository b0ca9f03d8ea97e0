"""The loader gives the stream's order whatever decodes it, and names what it cannot decode."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from meshwright.config import Batch, BatchConfig, DataConfig, derive_batch
from meshwright.data.loader import Loader
from meshwright.data.source import ConcatenatedSource, IndexableSource
from meshwright.data.stream import Stream
from meshwright.errors import DataError

STREAM = Stream.from_lengths(3, 12, [50], [1.0], 0.1)


class Echo:
    """Sample i is i; decoding takes a time that would disorder anything that can be disordered."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        time.sleep((index * 7 % 5) / 2000)
        if index in self.broken:
            raise OSError("disk says no")
        return np.full(3, index), np.full(2, index)

    def __init__(self, broken=()):
        self.broken = broken


def ids_of(source, batch: Batch, coordinate: int, first: int, end: int, **data) -> list[list[int]]:
    loader = Loader(ConcatenatedSource([IndexableSource(source)]), STREAM, batch, coordinate, DataConfig(**data))
    return [[int(i) for micro in step for i in micro.tensors[0][:, 0]] for step in loader.steps(first, end)]


@pytest.mark.parametrize(
    "workers", [{"workers": 0}, {"workers": 3}, {"workers": 3, "worker_kind": "process"}, {"workers": 2, "prefetch": 1}]
)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_order_never_depends_on_workers_or_ranks(workers, replicas):
    batch = derive_batch(BatchConfig(12, 3), replicas) if replicas != 1 else derive_batch(BatchConfig(12, 4), 1)
    by_rank = [ids_of(Echo(), batch, rank, 2, 9, **workers) for rank in range(replicas)]
    together = [sum((rank[i] for rank in by_rank), []) for i in range(7)]
    assert together == [STREAM.step(step).tolist() for step in range(2, 9)]


@pytest.mark.parametrize("workers", [{"workers": 0}, {"workers": 2}, {"workers": 2, "worker_kind": "process"}])
def test_global_generators_are_left_alone(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    ids_of(Echo(), Batch(12, 4, 1, 3), 0, 0, 5, **workers)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("workers", [{"workers": 0}, {"workers": 3}, {"workers": 2, "worker_kind": "process"}])
def test_a_sample_that_cannot_be_decoded_is_named_by_source_and_id_in_its_turn(workers):
    broken = int(STREAM.step(2)[5])
    loader = Loader(
        ConcatenatedSource([IndexableSource(Echo({broken}), "echo")]),
        STREAM,
        Batch(12, 4, 1, 3),
        0,
        DataConfig(**workers),
    )
    for number, micros in enumerate(loader.steps(0, 3)):
        bad = [bad for micro in micros for bad in micro.bad_samples]
        assert len(bad) == (number == 2)
        if bad:
            assert (
                str(bad[0]) == f"sample {broken} (source echo, index {broken}) cannot be decoded: OSError: disk says no"
            )


def test_quarantine_masks_the_sample_and_keeps_every_other_place():
    stream = Stream.from_lengths(3, 50, [50], [1.0], 0.0)
    loader = Loader(
        ConcatenatedSource([IndexableSource(Echo({17, 4}))]),
        stream,
        Batch(50, 50, 1, 1),
        0,
        DataConfig(on_bad_sample="quarantine"),
    )
    [[micro]] = list(loader.steps(0, 1))
    order = stream.step(0).tolist()
    assert [int(i) for i in micro.tensors[0][:, 0]] == [0 if i in (17, 4) else i for i in order]
    assert micro.valid_targets == 48 * 2
    assert {bad.sample for bad in micro.bad_samples} == {17, 4}


def test_ragged_samples_are_named():
    ragged = [(np.ones(3), 1)] * 5 + [(np.ones(4), 1)] * 45
    loader = Loader(
        ConcatenatedSource([IndexableSource(ragged)]), STREAM, Batch(12, 12, 1, 1), 0, DataConfig(workers=0)
    )
    with pytest.raises(DataError, match="has the shapes"):
        list(loader.steps(0, 4))


def test_stopping_early_leaves_no_thread_waiting():
    steps = Loader(
        ConcatenatedSource([IndexableSource(Echo())]), STREAM, Batch(12, 4, 1, 3), 0, DataConfig(workers=3)
    ).steps(0, 10**9)
    next(steps)
    steps.close()
    end = time.monotonic() + 10
    while (left := [t for t in threading.enumerate() if t.name.startswith("loader")]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left
