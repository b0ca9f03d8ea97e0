"""Tests of meshwright.core.data.permutation: a fixed bijection for any length and key, in constant memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.data.permutation import MAX_LENGTH, Permutation


def order(n: int, key: str, count: int | None = None) -> list[int]:
    return Permutation(n, key)(np.arange(n if count is None else count, dtype=np.uint64)).tolist()


@given(st.integers(1, 3000), st.text(max_size=20))
def test_permutation_is_a_bijection_of_any_length(n, key):
    assert sorted(order(n, key)) == list(range(n))


@given(
    st.integers(1, MAX_LENGTH), st.text(max_size=8), st.lists(st.integers(0, MAX_LENGTH - 1), min_size=1, max_size=50)
)
def test_inverse_undoes_the_permutation_at_any_length(n, key, points):
    positions = np.array([p % n for p in points], dtype=np.uint64)
    permutation = Permutation(n, key)
    values = permutation(positions)
    assert int(values.max()) < n
    assert np.array_equal(permutation.inverse(values), positions)


def test_permutation_never_changes():
    """A change of these numbers would change the sample order of every existing run."""
    assert order(10, "meshwright") == FROZEN[10]
    assert order(1000, "meshwright", 8) == FROZEN[1000]
    assert order(10**12, "meshwright", 4) == FROZEN[10**12]
    assert order(2**62, "meshwright", 4) == FROZEN[2**62]


FROZEN = {
    10: [0, 2, 9, 3, 6, 7, 4, 1, 5, 8],
    1000: [755, 407, 166, 880, 918, 899, 608, 540],
    10**12: [538820840193, 71325335017, 422446782347, 766899330759],
    2**62: [2735408927026707375, 1431172396252500771, 1758037363787537605, 3312616073341852315],
}


def test_permutation_is_uniform():
    """Chi-square of (position, value) counts over many keys: 39 x 39 degrees of freedom, mean 1521, deviation 55."""
    counts = np.zeros((40, 40))
    for key in range(2000):
        counts[np.arange(40), order(40, f"even/{key}")] += 1
    expected = 2000 / 40
    assert 1521 - 5 * 55 < float(((counts - expected) ** 2 / expected).sum()) < 1521 + 5 * 55


def test_every_permutation_of_four_elements_is_reached():
    assert len({tuple(order(4, f"key/{key}")) for key in range(400)}) == 24


def test_permutation_memory_is_independent_of_the_length():
    peaks = []
    for n in (10**6, 10**12):
        permutation = Permutation(n, "memory")
        tracemalloc.start()
        permutation(np.arange(4096, dtype=np.uint64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] < 2_000_000


@pytest.mark.parametrize("n", [0, -1, MAX_LENGTH + 1])
def test_invalid_length_is_an_error(n):
    with pytest.raises(ValueError, match="elements"):
        Permutation(n, "")


def test_position_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="position 10 is out of range"):
        Permutation(10, "")(np.array([10], dtype=np.uint64))
