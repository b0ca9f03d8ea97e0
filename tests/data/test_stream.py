"""The stream keeps its contract on any ranks, in both directions, at any distance."""

from __future__ import annotations

import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.stream import CYCLE, Stream, mixture_quotas
from meshwright.errors import DataError


def at(stream: Stream, start: int, end: int) -> list[int]:
    return stream.sample_ids(np.arange(start, end, dtype=np.uint64)).tolist()


@given(st.integers(0, 2**63 - 1), st.integers(2, 300), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.4]))
def test_an_epoch_holds_each_trained_sample_once_and_the_batch_goes_on_into_the_next(seed, samples, batch, holdout):
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
def test_the_slices_of_all_ranks_are_the_step_in_order(seed, step, replicas):
    stream = Stream.from_lengths(seed, 12, [1000], [1.0], 0.01)
    slices = [stream.local_samples(step, rank, replicas).tolist() for rank in range(replicas)]
    assert sum(slices, []) == stream.step(step).tolist()


def test_order_depends_on_the_seed():
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
def test_find_leads_back_to_every_place_of_a_sample(seed, sources, position):
    stream = Stream.from_lengths(seed, 7, [n for n, _ in sources], [w for _, w in sources], 0.1)
    sample = at(stream, position, position + 1)[0]
    for place in stream.occurrences(sample):
        assert at(stream, place.position, place.position + 1) == [sample]
        assert place.step * 7 + place.index == place.position
        if place.position >= position:
            break
    assert place.position == position


def test_places_of_a_sample_come_in_the_order_of_training():
    stream = Stream.from_lengths(0, 7, [50, 30], [3.0, 1.0], 0.0)
    for sample in (0, 49, 50, 79):
        positions = [place.position for place in islice(stream.occurrences(sample), 300)]
        assert positions == sorted(set(positions))


def test_a_mixture_holds_exact_shares_and_repeats_nothing_within_an_epoch():
    stream = Stream.from_lengths(3, 16, [9000, 2600], [0.75, 0.25], 0.0)
    ids = np.array(at(stream, 0, CYCLE))
    first, second = ids[ids < 9000], ids[ids >= 9000]
    assert (len(first), len(second)) == (7500, 2500)
    assert len(set(first.tolist())) == 7500
    assert len(set(second.tolist())) == 2500
    both = np.array(at(stream, 0, 4 * CYCLE))
    epoch = both[both >= 9000][:2600]
    assert sorted(epoch.tolist()) == list(range(9000, 11600))


def test_a_mixture_is_mixed_at_every_scale():
    stream = Stream.from_lengths(3, 16, [9000, 9000], [1.0, 1.0], 0.0)
    ids = np.array(at(stream, 0, 2000)).reshape(20, 100)
    shares = (ids < 9000).mean(axis=1)
    assert 0.3 < shares.min() < shares.max() < 0.7


def test_quotas_use_up_the_cycle_and_refuse_what_rounds_to_nothing():
    assert mixture_quotas([1, 1, 1]) == [3334, 3333, 3333]
    assert sum(mixture_quotas([0.123, 4.56, 7.0])) == CYCLE
    with pytest.raises(DataError, match="source 1 has a share"):
        mixture_quotas([1.0, 1e-9])


def test_a_trillion_samples_cost_nothing_at_any_step():
    stream = Stream.from_lengths(0, 1024, [10**12], [1.0], 0.01)
    start = time.perf_counter()
    ids = stream.step(10**8)
    place = next(p for p in stream.occurrences(int(ids[5])) if p.step >= 10**8)
    assert time.perf_counter() - start < 1.0  # a pass over the data would take weeks
    assert (place.step, place.index) == (10**8, 5)


def test_the_contract_survives_json():
    for seed in (0, 5, 2**63 - 1):
        stream = Stream.from_lengths(seed, 8, [100, 50], [1.0, 2.0], 0.1)
        assert Stream.from_json(stream.to_json()) == stream


def test_what_cannot_be_a_stream_is_named():
    with pytest.raises(DataError, match="source 0 is empty"):
        Stream.from_lengths(0, 4, [0], [1.0], 0.0)
    with pytest.raises(DataError, match="leaves none to train on"):
        Stream.from_lengths(0, 4, [1], [1.0], 0.1)
    with pytest.raises(DataError, match="sample 12 is not in the stream"):
        list(Stream.from_lengths(0, 4, [12], [1.0], 0.0).occurrences(12))


FROZEN = [1067, 454, 379, 452, 639, 1042, 281, 371, 1308, 42, 1198, 1376, 382, 220, 799, 1253]


def test_frozen_order():
    """These ids never change: they are the sample order of every run with this seed."""
    stream = Stream.from_lengths(0, 8, [1000, 500], [2.0, 1.0], 0.01)
    assert stream.step(0).tolist() + stream.step(10**6).tolist() == FROZEN
