"""Tests of meshwright.core.data.batch_structure: entries by name, targets, and how valid targets are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.base.config import Batch, DataConfig
from meshwright.core.data.batch_structure import BatchStructure, CountRule
from meshwright.core.data.loader import Loader, MicroBatch, target_count
from meshwright.core.data.source import (
    ConcatenatedSource,
    IndexableSource,
    collate_samples,
    find_structure,
    raise_if_not_repeatable,
)
from meshwright.core.data.stream import Stream
from meshwright.errors import DataError


@dataclass(frozen=True)
class Pair:
    """A sample that validates itself; a batch of samples would not pass."""

    question: Any
    answer: Any
    label: int = 0

    def __post_init__(self) -> None:
        assert np.ndim(self.label) == 0


def test_dict_is_found_by_name_whatever_its_order():
    structure = BatchStructure.of({"labels": 2, "input_ids": 0, "attention_mask": 1})
    assert structure.names == ("attention_mask", "input_ids", "labels")
    assert structure.flatten({"attention_mask": "m", "labels": "l", "input_ids": "i"}) == ("m", "i", "l")
    assert structure.entries(("m", "i", "l")) == {"labels": "l", "input_ids": "i", "attention_mask": "m"}
    assert structure.target_names() == {"labels"}
    assert structure == BatchStructure.of({"labels": 2, "input_ids": 0, "attention_mask": 1})


def test_missing_and_extra_entries_are_named():
    structure = BatchStructure.of({"x": 0, "inner": {"a": 1, "b": 2}, "labels": 3})
    with pytest.raises(ValueError, match=r"entry 'inner.b' is missing"):
        structure.flatten({"x": 0, "inner": {"a": 1}, "labels": 3})
    with pytest.raises(ValueError, match=r"entry 'z' is not in the first sample"):
        structure.flatten({"x": 0, "inner": {"a": 1, "b": 2}, "labels": 3, "z": 4})
    with pytest.raises(ValueError, match="is a tuple, expected a dict"):
        structure.flatten((1, 2))


def test_nested_entries_and_dataclasses_are_rebuilt():
    sample = {"pair": Pair(1, (2, 3)), "image": {"pixels": 4}}
    structure = BatchStructure.of(sample)
    assert structure.names == ("image.pixels", "pair.answer.0", "pair.answer.1", "pair.question", "pair.label")
    assert structure.unflatten(structure.flatten(sample)) == sample
    assert BatchStructure.of(Pair(1, 2)).unflatten((1, 2, np.zeros(3))).label.shape == (3,)


def test_last_entry_of_a_tuple_is_the_target():
    structure = BatchStructure.of((10, 11, 12))
    assert (structure.targets, structure.count) == ((2,), CountRule("valid", 2))
    assert structure.flatten((1, 2, 3)) == (1, 2, 3)


def test_batch_without_a_named_target_has_no_count():
    assert BatchStructure.of({"x": 0, "y": 1}).count is None


def test_targets_are_counted_by_the_rule():
    labels = torch.tensor([[1, 2, -100], [-100, 3, 4]])
    counts = {kind: int(target_count(CountRule(kind, 0), [labels])) for kind in ("valid", "shifted", "samples")}
    assert counts == {"valid": 4, "shifted": 3, "samples": 2}
    assert int(target_count(CountRule("nonzero", 0), [torch.tensor([[1, 1, 0], [0, 0, 1]])])) == 3
    assert int(target_count(CountRule("valid", 0), [torch.ones(5, 2)])) == 5  # regression: samples


class Sentences:
    """Sentences of different lengths as dicts whose keys alternate in order."""

    broken: Any = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.broken:
            return {"tokens": np.arange(3)}
        entries = {"tokens": np.arange(1, 3 + index % 3), "labels": index % 2}
        return dict(reversed(entries.items())) if index % 2 else entries


def pad(samples):
    longest = max(len(s["tokens"]) for s in samples)
    tokens = np.stack([np.pad(s["tokens"], (0, longest - len(s["tokens"]))) for s in samples])
    labels = np.stack([np.where(row > 0, row, -100) for row in tokens])
    return {"labels": torch.from_numpy(labels), "tokens": torch.from_numpy(tokens)}


def load(dataset, collate=None, **data) -> list[MicroBatch]:
    source = ConcatenatedSource([IndexableSource(dataset, "sentences", collate)])
    stream, structure = Stream.from_lengths(0, 4, [8], [1.0], 0.0), find_structure(source, collate)
    loader = Loader(source, stream, Batch(4, 2, 1, 2), 0, DataConfig(**data), structure=structure, collate=collate)
    return [batch for step in loader.steps(0, 2) for batch in step]


def test_collate_pads_each_micro_batch_and_ignored_labels_are_not_counted():
    batches = load(Sentences(), pad)
    assert len({batch.tensors[0].shape for batch in batches}) > 1
    assert sum(batch.valid_targets for batch in batches) == sum(len(Sentences()[i]["tokens"]) for i in range(8))


def test_missing_entry_is_a_bad_sample_with_its_name():
    class Fixed(Sentences):
        def __getitem__(self, index):
            return {"labels": index} if index == 5 else {"tokens": np.ones(3), "labels": index}

    [bad] = [bad for batch in load(Fixed()) for bad in batch.bad_samples]
    assert str(bad) == ("sample 5 (source sentences, index 5) cannot be decoded: ValueError: entry 'tokens' is missing")


def test_quarantine_leaves_a_bad_sample_out_of_a_collated_batch():
    class Broken(Sentences):
        def __getitem__(self, index):
            if index in (3, 4):
                raise OSError("read error")
            return super().__getitem__(index)

    batches = load(Broken(), pad, on_bad_sample="quarantine")
    assert {bad.sample for batch in batches for bad in batch.bad_samples} == {3, 4}
    assert sum(b.valid_targets for b in batches) == sum(
        len(Sentences()[i]["tokens"]) for i in range(8) if i not in (3, 4)
    )


def test_collate_that_fails_or_is_random_is_named():
    with pytest.raises(DataError, match=r"collate failed on sentences: KeyError: 'absent'"):
        find_structure(IndexableSource(Sentences(), "sentences", pad), lambda samples: samples[0]["absent"])

    def noisy(samples):
        return {"tokens": np.random.rand(len(samples)), "labels": np.zeros(len(samples))}

    with pytest.raises(DataError, match="two calls of collate"):
        raise_if_not_repeatable(IndexableSource(Sentences(), "sentences", noisy), noisy)
    assert collate_samples(lambda samples: [1, 2], [], "") == (1, 2)
