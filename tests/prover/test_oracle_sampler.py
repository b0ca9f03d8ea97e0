"""The oracle's sample order is a complete permutation per epoch, and that of the package at any position."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.data.stream import Stream
from meshwright.prover.oracle.sampler import CYCLE, Sampler, permute, quotas


@settings(max_examples=20)
@given(st.integers(1, 300), st.text(max_size=5))
def test_permutation_is_one_to_one(n, key):
    assert sorted(permute(key, n, value) for value in range(n)) == list(range(n))


def test_quotas_follow_the_weights():
    assert quotas([1, 1, 1]) == [3334, 3333, 3333]
    assert quotas([0.7, 0.2, 0.1]) == [7000, 2000, 1000]


MIXTURE = Sampler(seed=3, global_batch=32, lengths=(70, 1000, 41), weights=(1.0, 2.5, 0.5), holdout=0.05)


def test_epochs_are_complete_and_evaluation_reads_other_samples():
    sampler = replace(MIXTURE, lengths=(130,), weights=(1.0,))
    held_out = sampler.evaluated(100)
    assert len(held_out) == 6
    epochs = [[sampler.sample(124 * epoch + i) for i in range(124)] for epoch in range(3)]
    assert all(sorted(epoch + held_out) == list(range(130)) for epoch in epochs)
    assert all(a != b for a, b in pairwise(epochs))


def test_mixture_has_its_quotas_in_every_cycle():
    for cycle in (0, 5):
        sources = [MIXTURE.place(cycle * CYCLE + position)[0] for position in range(CYCLE)]
        assert [sources.count(source) for source in range(3)] == quotas(MIXTURE.weights) == [2500, 6250, 1250]
    held_out = set(MIXTURE.evaluated(10_000))
    assert len(held_out) == 3 + 50 + 2
    assert not held_out & {MIXTURE.sample(position) for position in range(3000)}


@settings(max_examples=20)
@given(st.integers(0, 2**50), st.sampled_from([MIXTURE, replace(MIXTURE, lengths=(10**12,), weights=(1.0,), seed=9)]))
def test_sample_order_is_that_of_the_package_at_any_position(position, sampler):
    stream = Stream.from_lengths(sampler.seed, sampler.global_batch, sampler.lengths, sampler.weights, sampler.holdout)
    step = position // sampler.global_batch
    assert sampler.step(step) == stream.step(step).tolist()
    assert sampler.evaluated(50) == stream.held_out_samples(50).tolist()
