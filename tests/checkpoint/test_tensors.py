"""One digest for the same tensors whatever their sharding, and differences told in numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from small_checkpoints import FACTS, LINEAGE, notes_at

from meshwright.checkpoint.listing import CheckpointEntry
from meshwright.checkpoint.manifest import FileRecord, Manifest, TensorRecord, TensorRegion
from meshwright.checkpoint.state import CheckpointState, dtype_name, parameters_digest, tensor_bytes
from meshwright.checkpoint.unsharded import compare_checkpoints, state_digest
from meshwright.store.posix import PosixStore


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of as many parts, where there are as many elements."""
    edges = sorted({size * k // parts for k in range(parts + 1)})
    return [(a, b - a) for a, b in pairwise(edges)] or [(0, size)]


def entry_of(root, state: CheckpointState, parts: tuple[int, ...] = (1,), name: str = "one") -> CheckpointEntry:
    """A checkpoint written by hand: each tensor cut along its first axes, the blocks in files in turn."""
    files, tensors = {}, {}
    (root / name).mkdir()
    for key, tensor in reversed(state.items()):
        pieces = []
        axes = [cuts(size, many) for size, many in zip(tensor.shape, parts, strict=False)]
        axes += [[(0, size)] for size in tensor.shape[len(axes) :]]
        for block in product(*axes):
            part = tensor_bytes(tensor[tuple(slice(start, start + length) for start, length in block)])
            file = f"rank-{len(pieces) % 2:05d}.shard"
            start = files.setdefault(file, 0)
            with open(root / name / file, "ab") as out:
                out.write(part)
            files[file] += len(part)
            offset, shape = zip(*block, strict=True) if block else ((), ())
            pieces.append(TensorRegion(tuple(offset), tuple(shape), file, start, len(part)))
        tensors[key] = TensorRecord(dtype_name(tensor), tuple(tensor.shape), tuple(pieces))
    place = {"run": LINEAGE.run, "timeline": 1, "step": 1, "attempt": 1, "ordinal": 0, "parent": "", "owners": {}}
    records = {file: FileRecord(size, ("",) * -(-size // (8 << 20))) for file, size in files.items()}
    manifest = Manifest(**place, **FACTS, **notes_at(1).shared_fields, files=records, tensors=tensors)
    manifest.validate()
    return CheckpointEntry(PosixStore(root), name, 1, 1, manifest)


@pytest.fixture
def state() -> CheckpointState:
    return {
        "model/grid": torch.arange(84, dtype=torch.float32).reshape(7, 12) / 3,
        "model/half": torch.arange(9).to(torch.bfloat16) / 7,
        "buffer/eight": torch.arange(6).to(torch.float8_e4m3fn),
        "buffer/seen": torch.tensor([2**60, -1, 5]),
        "buffer/mask": torch.tensor([True, False, True]),
        "buffer/none": torch.zeros(0, 4),
        "optimizer/step": torch.tensor(3.0),
    }


def test_the_digest_is_the_same_whatever_the_sharding(tmp_path, state):
    """C6"""
    expected = parameters_digest(state.items())
    for parts in [(1,), (2,), (3,), (7,), (2, 3), (3, 2), (1, 3)]:
        entry = entry_of(tmp_path, state, parts, "-".join(map(str, parts)))
        blocks = len(entry.manifest.tensors["model/grid"].regions)
        assert blocks == math.prod(parts), parts
        assert state_digest(entry) == expected, parts
        assert list(compare_checkpoints(entry, entry)) == []


def test_the_digest_does_not_depend_on_the_order_of_the_tensors(tmp_path, state):
    assert parameters_digest(reversed(state.items())) == state_digest(entry_of(tmp_path, state))


def test_the_digest_changes_with_any_bit(tmp_path, state):
    entry = entry_of(tmp_path, state, (2,))
    before = state_digest(entry)
    seen = {before}
    for file in entry.manifest.files:
        path = tmp_path / "one" / file
        whole = path.read_bytes()
        for position in range(0, len(whole), 3):
            broken = bytearray(whole)
            broken[position] ^= 1 << position % 8
            path.write_bytes(broken)
            seen.add(state_digest(entry))
        path.write_bytes(whole)
    assert len(seen) == 1 + sum(-(-record.size // 3) for record in entry.manifest.files.values())
    assert state_digest(entry) == before


def test_the_digest_changes_with_a_name_a_dtype_a_shape_or_a_tensor_more():
    numbers = torch.zeros(6)
    states = [
        {"model/a": numbers},
        {"model/b": numbers},
        {"model/a": numbers.view(torch.int32)},
        {"model/a": numbers.reshape(2, 3)},
        {"model/a": numbers, "model/b": numbers},
        {"model/a": numbers, "model/none": numbers[:0]},
        {},
    ]
    assert len({parameters_digest(state.items()) for state in states}) == len(states)


def altered(state: CheckpointState, name: str, where, value) -> CheckpointState:
    changed = state[name].clone()
    changed[where] = value
    return state | {name: changed}


@pytest.mark.parametrize(
    ("name", "where", "value", "largest"),
    [
        ("model/grid", (6, 11), 28.5, 28.5 - 83 / 3),
        ("model/half", 0, 0.25, 0.25),
        ("buffer/seen", 1, 6, 7),
        ("buffer/seen", 0, 2**60 + 1, 1),
        ("buffer/mask", 1, True, 1),
        ("optimizer/step", (), 2.5, 0.5),
        ("model/grid", (0, 0), math.inf, math.inf),
        ("model/grid", (0, 0), math.nan, math.nan),
    ],
)
def test_a_difference_names_the_tensor_and_says_how_large_it_is(tmp_path, state, name, where, value, largest):
    one = entry_of(tmp_path, state, (2,))
    other = entry_of(tmp_path, altered(state, name, where, value), (3,), "other")
    (found,) = compare_checkpoints(one, other)
    assert (found.name, found.elements) == (name, 1)
    assert found.largest == pytest.approx(largest, nan_ok=True, rel=1e-6)
    assert str(found).startswith(f"{name}: 1 of {state[name].numel()} elements; largest ")


def test_a_difference_is_told_beside_the_largest_value(tmp_path, state):
    one = entry_of(tmp_path, state)
    (found,) = compare_checkpoints(one, entry_of(tmp_path, altered(state, "model/grid", (0, 0), 1.0), (1,), "other"))
    assert found.relative == pytest.approx(1 / (83 / 3), rel=1e-6)


def test_the_same_nan_is_no_difference_and_another_zero_is_one(tmp_path, state):
    """Compared by bits: what would not resume the same is not the same."""
    state["model/grid"][2, 2] = math.nan
    one = entry_of(tmp_path, state)
    assert not list(compare_checkpoints(one, entry_of(tmp_path, state, (2,), "same")))
    (found,) = compare_checkpoints(one, entry_of(tmp_path, altered(state, "model/grid", (0, 0), -0.0), (1,), "zero"))
    assert (found.elements, found.largest) == (1, 0.0)


def test_tensors_of_one_side_alone_and_of_another_kind_are_named(tmp_path, state):
    one = entry_of(tmp_path, state)
    changed = {name: tensor for name, tensor in state.items() if name != "buffer/mask"}
    changed |= {"model/new": torch.zeros(1), "model/half": state["model/half"].float()}
    other = entry_of(tmp_path, changed | {"buffer/seen": torch.zeros(2, dtype=torch.int64)}, (1,), "other")
    assert [str(found) for found in compare_checkpoints(one, replace(other, folder="other"))] == [
        "buffer/mask: only in one",
        "buffer/seen: int64 [3] and int64 [2]",
        "model/half: bfloat16 [9] and float32 [9]",
        "model/new: only in other",
    ]
