"""Format compatibility: a stored checkpoint of every format verifies and loads its original values."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest
import torch

from meshwright.base.checkpoint.format.manifest_parts import FORMAT
from meshwright.base.checkpoint.listing import RunLineage, list_published
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.parallel.world import World

FIXTURES = Path(__file__).parent / "fixtures"
SHARDS = {
    "rank-00000.shard": "5c8d27ca16e4375f2c3333b63a7cde5a4431e1cf90d08db893ff69478bc467ec",
    "rank-00001.shard": "29d031c1d70d9b0cad74f18ccc562bed364c3654ac079e8bf5f65d7525b75ba7",
}
FILES = {
    1: SHARDS | {"manifest.json": "03b6b6c6ab02da706a2c4bbdd0a9f8cd5aa6d311d64ce36444ce9f367526890c"},
    2: SHARDS
    | {
        "manifest.json": "54fec8add32806457a0ef0bde3d98b8d734c7075aa7fcf13d9ccbdc506f8ecb3",
        "rank-00000.part.json": "106cb200a69c939ebc84b323c456041f3e2f9b7d7e3a385e7700b29878b8c3a5",
        "rank-00001.part.json": "108233b29ed593a8a8ece1dc68c1fae142c27a10d6ce019feb6ba494ac9b6499",
    },
}
"""SHA-256 of the files by format, so that a regenerated fixture is noticed."""
every_format = pytest.mark.parametrize("number", FILES)


def fixture(number: int) -> Path:
    return FIXTURES / f"format-{number}"


def hash_files(root: Path) -> dict[str, str]:
    folder = root / "checkpoints" / "step-00000003.a0001"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@every_format
def test_fixture_is_unchanged(number):
    assert hash_files(fixture(number)) == FILES[number]


@every_format
def test_fixture_verifies_and_has_its_original_fields(number):
    (entry,) = list_published(PosixStore(fixture(number)))
    assert find_damage(entry) == []
    manifest = entry.manifest
    assert manifest.format == number
    assert (manifest.run, manifest.timeline, manifest.step, manifest.attempt) == ("00c0ffee", 1, 3, 1)
    assert (manifest.ordinal, manifest.parent, manifest.chunk) == (2, "ab" * 32, 1024)
    assert (manifest.layout, manifest.data, manifest.counters) == ({"replicate": 2}, {"next": 24}, {"tokens": 6144})
    assert (manifest.rng, manifest.scaler) == ({"data 0": 5, "data 1": 6}, {})
    assert (manifest.identity, manifest.schedule) == ({"seed": 17, "eps": 1e-08}, {"lr": 0.001})
    owners = {part.owner: entry.read_part(name).state for name, part in manifest.parts.items()}
    assert owners == {"data 0": {"noise": [0.1, 0.2]}, "data 1": {}}
    assert manifest.total_bytes == 4228 + 4226
    assert [region.file for region in entry.index.regions("model/weight")] == list(SHARDS)
    assert state_digest(entry) == "d36b47c73922cf42a324b313d19a943a482131e33cc25333523cf7c336964475"


@every_format
def test_fixture_restores_its_original_values(number):
    state = {
        "model/weight": torch.full((2, 3), torch.nan),
        "model/half": torch.zeros(3, dtype=torch.bfloat16),
        "buffer/seen": torch.zeros(2, dtype=torch.int64),
        "buffer/mask": torch.tensor([False, True]),
        "optimizer/weight/step": torch.tensor(0.0),
    }
    lineage = RunLineage("00c0ffee", 1, {})
    options = {"fallback": False, "on_damaged": lambda *_: None, "owner": "data 0"}
    found = restore(PosixStore(fixture(number)), World(), lineage, state, lambda _: None, **options)
    assert found.owner_state == {"noise": [0.1, 0.2]}
    assert found.name == "step-00000003.a0001"
    assert torch.equal(state["model/weight"], torch.tensor([[0.5, -1.25, 3.0], [1e-8, 2.0**100, 0.0]]))
    assert state["model/weight"][1, 2].signbit()
    assert state["model/half"].tolist() == [1.5, -2.0, 0.0078125]
    assert state["buffer/seen"].tolist() == [2**62 + 1, -7]
    assert state["buffer/mask"].tolist() == [True, False]
    assert state["optimizer/weight/step"].item() == 3.0


def test_both_formats_describe_the_same_regions():
    one, other = (list_published(PosixStore(fixture(number)))[0] for number in FILES)
    assert one.manifest.tensors == other.manifest.tensors
    assert all(one.index.regions(name) == other.index.regions(name) for name in one.manifest.tensors)


@every_format
def test_format_is_written_byte_for_byte_as_in_the_fixture(tmp_path, monkeypatch, number):
    """A change of the written bytes needs a new format number. Format 1 is no longer written by a run."""
    assert max(FILES) == FORMAT
    monkeypatch.setattr(sys, "path", [str(FIXTURES), *sys.path])
    importlib.import_module(f"make_format_{number}").make(tmp_path)
    assert hash_files(tmp_path) == FILES[number]
