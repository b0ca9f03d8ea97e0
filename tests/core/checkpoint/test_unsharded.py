"""Tests of meshwright.core.checkpoint.unsharded: the layout-independent digest, and the comparison of checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from meshwright.base.checkpoint.format.canonical import canonical_digest, serialize
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.state import CheckpointState, dtype_name, parameters_digest, tensor_bytes
from meshwright.core.checkpoint.unsharded import compare_checkpoints, model_order, state_digest
from tests.core.checkpoint.checkpoint_fixtures import ATTEMPT_FIELDS, LINEAGE, metadata_at


def split_evenly(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of each of `parts` parts, or of fewer if there are fewer elements."""
    edges = sorted({size * k // parts for k in range(parts + 1)})
    return [(a, b - a) for a, b in pairwise(edges)] or [(0, size)]


def write_checkpoint(root, state: CheckpointState, parts: tuple[int, ...] = (1,), name: str = "one") -> CheckpointEntry:
    """Write a checkpoint of format 1 without the saver: tensors split along their first dimensions, in two files."""
    files, tensors = {}, {}
    (root / name).mkdir()
    for key, tensor in reversed(state.items()):
        regions = []
        axes = [split_evenly(size, count) for size, count in zip(tensor.shape, parts, strict=False)]
        axes += [[(0, size)] for size in tensor.shape[len(axes) :]]
        for spans in product(*axes):
            content = tensor_bytes(tensor[tuple(slice(start, start + length) for start, length in spans)])
            file = f"rank-{len(regions) % 2:05d}.shard"
            start = files.setdefault(file, 0)
            with open(root / name / file, "ab") as out:
                out.write(content)
            files[file] += len(content)
            offset, shape = zip(*spans, strict=True) if spans else ((), ())
            where = {"file": file, "start": start, "length": len(content)}
            regions.append({"offset": offset, "shape": shape} | where)
        tensors[key] = {"dtype": dtype_name(tensor), "shape": tuple(tensor.shape), "pieces": regions}
    position = {"run": LINEAGE.run, "timeline": 1, "step": 1, "attempt": 1, "ordinal": 0, "parent": "", "owners": {}}
    records = {file: {"size": size, "chunks": [""] * -(-size // (8 << 20))} for file, size in files.items()}
    content = {"format": 1, "chunk": 8 << 20, "files": records, "tensors": tensors}
    values = position | ATTEMPT_FIELDS | metadata_at(1).shared_fields | content
    manifest = Manifest.decode(serialize(values, canonical_digest(values)))
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


def test_state_digest_is_independent_of_the_sharding(tmp_path, state):
    expected = parameters_digest(state.items())
    for parts in [(1,), (2,), (3,), (7,), (2, 3), (3, 2), (1, 3)]:
        entry = write_checkpoint(tmp_path, state, parts, "-".join(map(str, parts)))
        regions = len(entry.index.regions("model/grid"))
        assert regions == math.prod(parts), parts
        assert state_digest(entry) == expected, parts
        assert list(compare_checkpoints(entry, entry)) == []


def test_state_digest_is_independent_of_the_order_of_the_tensors(tmp_path, state):
    assert parameters_digest(reversed(state.items())) == state_digest(write_checkpoint(tmp_path, state))


def test_state_digest_depends_on_every_bit(tmp_path, state):
    entry = write_checkpoint(tmp_path, state, (2,))
    before = state_digest(entry)
    seen = {before}
    for file in entry.manifest.parts:
        path = tmp_path / "one" / file
        content = path.read_bytes()
        for position in range(0, len(content), 3):
            broken = bytearray(content)
            broken[position] ^= 1 << position % 8
            path.write_bytes(broken)
            seen.add(state_digest(entry))
        path.write_bytes(content)
    assert len(seen) == 1 + sum(-(-part.shard_bytes // 3) for part in entry.manifest.parts.values())
    assert state_digest(entry) == before


def test_state_digest_depends_on_names_dtypes_shapes_and_the_set_of_tensors():
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


def alter(state: CheckpointState, name: str, where, value) -> CheckpointState:
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
def test_difference_names_the_tensor_and_its_largest_difference(tmp_path, state, name, where, value, largest):
    one = write_checkpoint(tmp_path, state, (2,))
    other = write_checkpoint(tmp_path, alter(state, name, where, value), (3,), "other")
    (found,) = compare_checkpoints(one, other)
    assert (found.name, found.elements) == (name, 1)
    assert found.largest == pytest.approx(largest, nan_ok=True, rel=1e-6)
    assert str(found).startswith(f"{name}: 1 of {state[name].numel()} elements; largest difference ")


def test_difference_is_relative_to_the_largest_value(tmp_path, state):
    one = write_checkpoint(tmp_path, state)
    (found,) = compare_checkpoints(
        one, write_checkpoint(tmp_path, alter(state, "model/grid", (0, 0), 1.0), (1,), "other")
    )
    assert found.relative == pytest.approx(1 / (83 / 3), rel=1e-6)


def test_tensors_are_compared_by_their_bits(tmp_path, state):
    """Equal NaN bits are no difference, and a negative zero is one."""
    state["model/grid"][2, 2] = math.nan
    one = write_checkpoint(tmp_path, state)
    assert not list(compare_checkpoints(one, write_checkpoint(tmp_path, state, (2,), "same")))
    (found,) = compare_checkpoints(
        one, write_checkpoint(tmp_path, alter(state, "model/grid", (0, 0), -0.0), (1,), "zero")
    )
    assert (found.elements, found.largest) == (1, 0.0)


def test_tensors_of_only_one_checkpoint_and_of_another_dtype_or_shape_are_differences(tmp_path, state):
    one = write_checkpoint(tmp_path, state)
    changed = {name: tensor for name, tensor in state.items() if name != "buffer/mask"}
    changed |= {"model/new": torch.zeros(1), "model/half": state["model/half"].float()}
    other = write_checkpoint(tmp_path, changed | {"buffer/seen": torch.zeros(2, dtype=torch.int64)}, (1,), "other")
    assert [str(found) for found in compare_checkpoints(one, replace(other, folder="other"))] == [
        "model/half: bfloat16 [9] and float32 [9]",
        "model/new: only in other",
        "buffer/mask: only in one",
        "buffer/seen: int64 [3] and int64 [2]",
    ]


def test_differences_are_ordered_as_the_model_computes():
    names = ["optimizer/decoder.blocks.0.a/exp_avg", "model/head.weight", "model/decoder.blocks.10.a"]
    names += ["buffer/decoder.blocks.0.b", "model/decoder.norm.weight", "model/decoder.blocks.2.a"]
    names += ["model/decoder.embedding.weight"]
    assert sorted(names, key=model_order) == [
        "model/decoder.embedding.weight",
        "model/decoder.blocks.2.a",
        "model/decoder.blocks.10.a",
        "model/decoder.norm.weight",
        "model/head.weight",
        "buffer/decoder.blocks.0.b",
        "optimizer/decoder.blocks.0.a/exp_avg",
    ]
