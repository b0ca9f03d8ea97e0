"""Tests of meshwright.core.data.stream: the sample order on any number of ranks, its inverse, and mixtures."""

from __future__ import annotations

import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.data.stream import CYCLE, Stream, mixture_quotas
from meshwright.errors import DataError


def sample_ids(stream: Stream, start: int, end: int) -> list[int]:
    return stream.sample_ids(np.arange(start, end, dtype=np.uint64)).tolist()


@given(st.integers(0, 2**63 - 1), st.integers(2, 300), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.4]))
def test_epoch_contains_each_training_sample_once_and_batches_cross_its_end(seed, samples, batch, holdout):
    stream = Stream.from_lengths(seed, batch, [samples], [1.0], holdout)
    trained = stream.sources[0].trained
    steps = np.concatenate([stream.step(k) for k in range(3 * trained // batch + 1)]).tolist()
    epochs = [steps[e * trained : (e + 1) * trained] for e in range(3)]
    held_out = set(stream.held_out_samples(samples).tolist())
    assert all(len(set(epoch)) == trained and not set(epoch) & held_out for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) == set(range(samples)) - held_out
    if trained > 20:
        assert epochs[0] != epochs[1]


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_local_samples_of_all_ranks_are_the_step_in_order(seed, step, data_degree):
    stream = Stream.from_lengths(seed, 12, [1000], [1.0], 0.01)
    by_rank = [stream.local_samples(step, rank, data_degree).tolist() for rank in range(data_degree)]
    assert sum(by_rank, []) == stream.step(step).tolist()


def test_sample_order_depends_on_the_seed():
    assert (
        Stream.from_lengths(1, 8, [1000], [1.0], 0.0).step(0).tolist()
        != Stream.from_lengths(2, 8, [1000], [1.0], 0.0).step(0).tolist()
    )


@settings(max_examples=25)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(2, 4000), st.floats(0.01, 10)), min_size=1, max_size=4),
    st.integers(0, 50_000),
)
def test_occurrences_are_the_inverse_of_sample_ids(seed, sources, position):
    stream = Stream.from_lengths(seed, 7, [n for n, _ in sources], [w for _, w in sources], 0.1)
    sample = sample_ids(stream, position, position + 1)[0]
    for occurrence in stream.occurrences(sample):
        assert sample_ids(stream, occurrence.position, occurrence.position + 1) == [sample]
        assert occurrence.step * 7 + occurrence.index == occurrence.position
        if occurrence.position >= position:
            break
    assert occurrence.position == position


def test_occurrences_are_in_training_order():
    stream = Stream.from_lengths(0, 7, [50, 30], [3.0, 1.0], 0.0)
    for sample in (0, 49, 50, 79):
        positions = [occurrence.position for occurrence in islice(stream.occurrences(sample), 300)]
        assert positions == sorted(set(positions))


def test_mixture_has_exact_shares_per_cycle_and_no_repetition_within_an_epoch():
    stream = Stream.from_lengths(3, 16, [9000, 2600], [0.75, 0.25], 0.0)
    ids = np.array(sample_ids(stream, 0, CYCLE))
    first, second = ids[ids < 9000], ids[ids >= 9000]
    assert (len(first), len(second)) == (7500, 2500)
    assert len(set(first.tolist())) == 7500
    assert len(set(second.tolist())) == 2500
    both = np.array(sample_ids(stream, 0, 4 * CYCLE))
    epoch = both[both >= 9000][:2600]
    assert sorted(epoch.tolist()) == list(range(9000, 11600))


def test_mixture_is_shuffled_within_a_cycle():
    stream = Stream.from_lengths(3, 16, [9000, 9000], [1.0, 1.0], 0.0)
    ids = np.array(sample_ids(stream, 0, 2000)).reshape(20, 100)
    shares = (ids < 9000).mean(axis=1)
    assert 0.3 < shares.min() < shares.max() < 0.7


def test_mixture_quotas_sum_to_the_cycle_and_reject_a_zero_share():
    assert mixture_quotas([1, 1, 1]) == [3334, 3333, 3333]
    assert sum(mixture_quotas([0.123, 4.56, 7.0])) == CYCLE
    with pytest.raises(DataError, match="source 1 has a share"):
        mixture_quotas([1.0, 1e-9])


def test_step_lookup_is_constant_time_for_a_trillion_samples():
    stream = Stream.from_lengths(0, 1024, [10**12], [1.0], 0.01)
    start = time.perf_counter()
    ids = stream.step(10**8)
    occurrence = next(p for p in stream.occurrences(int(ids[5])) if p.step >= 10**8)
    assert time.perf_counter() - start < 1.0  # a pass over the data would take weeks
    assert (occurrence.step, occurrence.index) == (10**8, 5)


def test_stream_json_round_trip():
    for seed in (0, 5, 2**63 - 1):
        stream = Stream.from_lengths(seed, 8, [100, 50], [1.0, 2.0], 0.1)
        assert Stream.from_json(stream.to_json()) == stream


def test_invalid_streams_are_errors():
    with pytest.raises(DataError, match="source 0 is empty"):
        Stream.from_lengths(0, 4, [0], [1.0], 0.0)
    with pytest.raises(DataError, match="leaves none for training"):
        Stream.from_lengths(0, 4, [1], [1.0], 0.1)
    with pytest.raises(DataError, match="sample 12 is not in the stream"):
        list(Stream.from_lengths(0, 4, [12], [1.0], 0.0).occurrences(12))


FROZEN = [1067, 454, 379, 452, 639, 1042, 281, 371, 1308, 42, 1198, 1376, 382, 220, 799, 1253]


def test_sample_order_never_changes():
    """A change of these ids would change the sample order of every existing run."""
    stream = Stream.from_lengths(0, 8, [1000, 500], [2.0, 1.0], 0.01)
    assert stream.step(0).tolist() + stream.step(10**6).tolist() == FROZEN
