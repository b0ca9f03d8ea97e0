"""Tests of meshwright.core.data.source: the sources that read no files."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.source import IndexableSource, SyntheticSource
from meshwright.errors import DataError


def test_indexable_source_accepts_tuples_sequences_and_dicts():
    pairs = IndexableSource([(np.ones(3), 1), (np.zeros(3), 0)])
    assert [int(target) for _, target in (pairs[0], pairs[1])] == [1, 0]
    sequences = IndexableSource([[1, 2, 3], [4, 5, 6]])
    assert [array.tolist() for array in sequences[1]] == [[4, 5], [5, 6]]
    numbers = IndexableSource([(3, 1), (5, 7, 0)])  # a tuple is (inputs..., target), of integers too
    assert [numbers[0], numbers[1]] == [(3, 1), (5, 7, 0)]
    records = IndexableSource([{"x": np.ones(2), "y": 3}])
    assert sorted(records[0]) == ["x", "y"]


def test_indexable_source_rejects_an_iterable_dataset():
    with pytest.raises(DataError, match="lacks __len__ or __getitem__"):
        IndexableSource(iter([]))


def test_indexable_source_fingerprint_depends_on_the_samples():
    assert IndexableSource([[1, 2, 3]]).fingerprint() != IndexableSource([[1, 2, 4]]).fingerprint()


def test_masked_sample_has_no_valid_target():
    inputs, targets = IndexableSource([(np.ones(3), np.array([1, 2]))]).masked_sample()
    assert (inputs.tolist(), targets.tolist()) == ([1, 1, 1], [IGNORE_INDEX, IGNORE_INDEX])


def test_masked_sample_of_float_targets_is_an_error():
    with pytest.raises(DataError, match="cannot quarantine"):
        IndexableSource([(np.ones(3), 0.5)]).masked_sample()


def test_synthetic_samples_depend_only_on_their_index():
    one, other = SyntheticSource(10**12, 8, 100), SyntheticSource(10**12, 8, 100)
    assert np.array_equal(one[10**11][0], other[10**11][0])
    assert not np.array_equal(one[0][0], one[1][0])
