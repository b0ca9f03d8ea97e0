"""Manifests of format 2 and their parts: forged content with correct digests is located, and never loaded."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from meshwright.base.block_sizes import BlockSizes
from meshwright.base.checkpoint.format.canonical import InvalidManifest, canonical_digest, serialize
from meshwright.base.checkpoint.format.manifest_parts import MAX_PART_BYTES, MAX_PARTS_BYTES, ManifestPart, part_file
from meshwright.base.checkpoint.format.regions import RegionTable, checksum, regions_overlap
from meshwright.base.checkpoint.listing import list_published
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.restore import gather_index, restore
from meshwright.core.checkpoint.state import parameters_digest
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.parallel.world import World
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, digest_at, save_on_two_ranks, state_at

PARTS = [part_file(0), part_file(1)]
BLOCKS = BlockSizes(digest_bytes=512)
TOO_MANY = MAX_PARTS_BYTES // MAX_PART_BYTES + 1
"""Enough parts of the largest size to exceed the limit of all parts."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    root = tmp_path_factory.mktemp("forged")
    for step in (1, 2):
        save_on_two_ranks(step, PosixStore(root), block_sizes=BLOCKS, keep=9)
    return root


@pytest.fixture
def run(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "run")


def newest_folder(run):
    return run / "checkpoints" / "step-00000002.a0001"


def read_values(path) -> dict:
    values = json.loads(path.read_bytes())
    del values["digest"]
    return values


def write_values(path, values) -> None:
    path.write_bytes(serialize(values, canonical_digest(values)))


def forge_root(run, forge) -> None:
    path = newest_folder(run) / MANIFEST_FILE
    values = read_values(path)
    forge(values)
    write_values(path, values)


def replace_part(run, rank: int, raw: bytes, digest: str) -> None:
    """Replace a part, and record it in the manifest as if it had been written so."""
    (newest_folder(run) / PARTS[rank]).write_bytes(raw)
    forge_root(run, lambda root: root["parts"][PARTS[rank]].update(size=len(raw), digest=digest))


def forge_part(run, rank: int, forge) -> None:
    values = read_values(newest_folder(run) / PARTS[rank])
    forge(values)
    digest = canonical_digest(values)
    replace_part(run, rank, serialize(values, digest), digest)


def assert_previous_is_restored(run) -> None:
    state, reported = state_at(0), []
    report = lambda *args: reported.append(args)  # noqa: E731
    found = restore(PosixStore(run), World(), LINEAGE, state, lambda _: None, fallback=True, on_damaged=report)
    assert found.manifest.step == 1
    assert parameters_digest(state.items()) == digest_at(1)
    assert reported[0][0] == "step-00000002.a0001"


def stored(values) -> str:
    """A tensor with elements that the part stores."""
    return next(name for name, regions in values["tensors"].items() if regions[0]["shape"])


def region(**altered):
    return lambda values: values["tensors"][stored(values)][0].update(altered)


def field(**altered):
    return lambda values: values.update(altered)


FORGED_PARTS = {
    "a part of another run": field(run="ffff0000"),
    "a part of another step": field(step=1),
    "a part of another attempt": field(attempt=2),
    "a part of another timeline": field(timeline=2),
    "a part of another rank": field(rank=1),
    "a shard above the folder": field(file="../rank-00000.shard"),
    "an absolute shard": field(file="/etc/passwd"),
    "the shard of another rank": field(file="rank-00001.shard"),
    "a shard that is a list": field(file=[]),
    "another owner": field(owner="9"),
    "an owner that is a list": field(owner=[]),
    "a state that is a list": field(state=[]),
    "a shard of another size": field(size=1),
    "a shard of negative size": field(size=-1, chunks=[]),
    "a missing digest": lambda v: v["chunks"].pop(),
    "digests that are numbers": lambda v: v.update(chunks=[1] * len(v["chunks"])),
    "chunks that are a number": field(chunks=1),
    "an unknown field": field(colour="blue"),
    "a missing field": lambda v: v.pop("owner"),
    "format 1": field(format=1),
    "a format that is a bool": field(format=True),
    "an unknown tensor": lambda v: v["tensors"].update({"model/new": []}),
    "tensors in a list": field(tensors=[]),
    "regions that are numbers": lambda v: v["tensors"].update({stored(v): [1, 2]}),
    "a region with a file": region(file="rank-00001.shard"),
    "a region without a start": lambda v: v["tensors"][stored(v)][0].pop("start"),
    "a negative start": region(start=-1),
    "a start that is a bool": region(start=True),
    "a start beyond the file": region(start=2**60),
    "a huge start": region(start=2**70),
    "a negative offset": lambda v: region(offset=[-1] * len(v["tensors"][stored(v)][0]["offset"]))(v),
    "an offset with too many dimensions": region(offset=[0] * 9),
    "a huge shape": lambda v: region(shape=[2**62] * len(v["tensors"][stored(v)][0]["shape"]))(v),
    "a wrong length": region(length=3),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", FORGED_PARTS)
def test_forged_part_is_located_and_the_previous_checkpoint_is_restored(run, how):
    forge_part(run, 0, FORGED_PARTS[how])
    entry = list_published(PosixStore(run))[0]
    assert entry.manifest is not None
    (damage,) = find_damage(entry)
    assert damage.file == PARTS[0]
    assert damage.expected != damage.found
    assert_previous_is_restored(run)


def duplicate(run) -> None:
    """Rank 1 claims the regions that rank 0 stores too."""
    first = read_values(newest_folder(run) / PARTS[0])["tensors"]
    claimed = {name: [region | {"start": 0} for region in regions] for name, regions in first.items()}
    forge_part(run, 1, lambda values: values["tensors"].update(claimed))


def store_twice(values) -> None:
    values["tensors"][stored(values)] *= 2


UNCOVERED = {
    "two parts that claim the same region": duplicate,
    "a tensor that no part stores": lambda run: forge_part(run, 0, lambda v: v["tensors"].pop(stored(v))),
    "a region twice": lambda run: forge_part(run, 0, store_twice),
    "a tensor of the manifest without regions": lambda run: forge_root(
        run, lambda v: v["tensors"].update({"model/new": {"dtype": "float32", "shape": [2]}})
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", UNCOVERED)
def test_parts_that_do_not_cover_every_tensor_once_are_found(run, how):
    UNCOVERED[how](run)
    entry = list_published(PosixStore(run))[0]
    (damage,) = find_damage(entry)
    assert damage.file == MANIFEST_FILE
    assert "elements, or some of them twice" in damage.found
    assert_previous_is_restored(run)


def part(**altered):
    return lambda values: values["parts"][PARTS[0]].update(altered)


def renamed(name):
    """The part of rank 0 under another name, in its place."""

    def forge(values):
        values["parts"] = {name if part == PARTS[0] else part: record for part, record in values["parts"].items()}

    return forge


FORGED_ROOTS = {
    "a part above the folder": renamed("../rank-00000.part.json"),
    "an absolute part": renamed("/etc/passwd"),
    "a part without a name": renamed(""),
    "a manifest as its part": renamed(MANIFEST_FILE),
    "a name with another spelling": renamed("rank-0.part.json"),
    "parts in another order": lambda v: v.update(parts=dict(reversed(v["parts"].items()))),
    "a part that is left out": lambda v: v["parts"].pop(PARTS[0]),
    "a part over the size limit": part(size=MAX_PART_BYTES + 1),
    "parts over their size limit": lambda v: v.update(
        parts={part_file(rank): v["parts"][PARTS[0]] | {"size": MAX_PART_BYTES} for rank in range(TOO_MANY)}
    ),
    "a negative size": part(size=-1),
    "a size that is a bool": part(size=True),
    "a shard of negative size": part(shard_bytes=-1),
    "a huge shard": part(shard_bytes=2**63),
    "a digest that is a number": part(digest=5),
    "an owner that is null": part(owner=None),
    "an unknown field of a part": part(file="x"),
    "a missing field of a part": lambda v: v["parts"][PARTS[0]].pop("digest") and v["parts"][PARTS[0]].pop("owner"),
    "a part that is a list": lambda v: v["parts"].update({PARTS[0]: []}),
    "parts in a list": field(parts=[]),
    "no parts": lambda v: v.pop("parts"),
    "files of format 1": field(files={}),
    "embedded parts": field(embedded={}),
    "regions in the manifest": lambda v: v["tensors"]["model/weight"].update(pieces=[]),
    "an unknown dtype": lambda v: v["tensors"]["model/weight"].update(dtype="complex64"),
    "a negative shape": lambda v: v["tensors"]["model/weight"].update(shape=[-1, 5]),
    "a shape of many dimensions": lambda v: v["tensors"]["model/weight"].update(shape=[1] * 65),
    "a tensor that is null": lambda v: v["tensors"].update({"model/weight": None}),
    "format 1": field(format=1),
    "format 3": field(format=3),
    "another step": field(step=3),
    "a seed that is a string": field(rng={"0": "x"}),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", FORGED_ROOTS)
def test_forged_manifest_is_invalid_and_the_previous_checkpoint_is_restored(run, how):
    forge_root(run, FORGED_ROOTS[how])
    entry = list_published(PosixStore(run))[0]
    assert entry.manifest is None
    assert [damage.file for damage in find_damage(entry)] == [MANIFEST_FILE]
    assert_previous_is_restored(run)


def test_unchanged_manifest_and_parts_are_valid(run):
    forge_part(run, 0, lambda _: None)
    assert find_damage(list_published(PosixStore(run))[0]) == []


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b"[]", b"null", b'"digest"', b"\xff\xfe", b"NaN"])
def test_content_that_is_not_a_part_is_located(run, content):
    replace_part(run, 1, content, "0" * 64)
    (damage,) = find_damage(list_published(PosixStore(run))[0])
    assert damage.file == PARTS[1]
    assert_previous_is_restored(run)


def test_deeply_nested_json_is_an_invalid_part():
    """At every depth around the recursion limit of the interpreter."""
    for depth in (*range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 20), 10**6):
        with pytest.raises(InvalidManifest):
            ManifestPart.decode(b'{"state":' + b"[" * depth + b"]" * depth + b',"digest":"0"}')


def test_part_that_has_grown_is_not_read_to_its_end(run):
    with open(newest_folder(run) / PARTS[0], "r+b") as file:
        file.truncate(1 << 40)
    (damage,) = find_damage(list_published(PosixStore(run))[0])
    assert (damage.file, damage.found) == (PARTS[0], f"{1 << 40:,} bytes")


class OneOfTwoRanks(World):
    """A rank of two whose peer has sent the rows of its part before."""

    def all_gather_array(self, array, name):
        PEERS[self.rank] = array
        return [PEERS.get(rank, torch.empty(0, dtype=torch.int64)) for rank in range(2)]


PEERS: dict[int, torch.Tensor] = {}


def test_ranks_read_their_own_parts_and_share_the_check_of_coverage(run, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PEERS", {})
    entry = list_published(PosixStore(run))[0]
    ranks = [OneOfTwoRanks(rank, 2) for rank in range(2)]
    for world in ranks:
        gather_index(entry, world)  # both have sent their rows
    for world in ranks:
        index, owner_state, damage = gather_index(entry, world, owner="1")
        assert damage == []
        assert owner_state == {"noise": {"signal": 0.30000000000000004, "noise": 1.0}}
        for name in entry.manifest.tensors:
            assert index.regions(name) == entry.index.regions(name)
    duplicate(run)
    entry = list_published(PosixStore(run))[0]
    for world in ranks:
        gather_index(entry, world)
    doubled = read_values(newest_folder(run) / PARTS[0])["tensors"]
    shares = {entry.manifest.tensor_numbers[name] % 2 for name in doubled}
    assert {world.rank for world in ranks if gather_index(entry, world)[2]} == shares


def test_region_tables_survive_encoding_and_merging():
    rows = [(0, 2, 64, 0, 0, 3, 5), (0, 0, 4096), (1, 1, 128, 7, 4), (1, 2, 0, 3, 0, 3, 5)]
    whole = RegionTable.from_rows(rows)
    parts = [RegionTable.from_rows(rows[:2]), RegionTable.from_rows(rows[2:])]
    merged = RegionTable.merge([RegionTable.decode(part.encode()) for part in parts])
    for number, dimensions in ((0, 0), (1, 1), (2, 2), (3, 1)):
        assert merged.rows(number, dimensions).tolist() == whole.rows(number, dimensions).tolist()
    assert len(whole.rows(2, 2)) == 2
    assert RegionTable.decode(RegionTable({}).encode()).blocks == {}


def test_overlap_of_random_boxes_is_that_of_their_elements():
    """In one and two dimensions, sharded along one or both, with empty regions."""
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        shape = tuple(generator.integers(1, 5, generator.integers(1, 3)).tolist())
        count = int(generator.integers(1, 5))
        offsets = np.stack([generator.integers(0, size, count) for size in shape], axis=1)
        shapes = np.stack([generator.integers(0, size - offsets[:, d] + 1) for d, size in enumerate(shape)], axis=1)
        elements = np.zeros(shape, int)
        for offset, size in zip(offsets, shapes, strict=True):
            elements[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
        expected = bool((elements > 1).any())
        assert regions_overlap(shape, offsets, shapes) == expected
        seen.add(expected)
    assert seen == {True, False}


def test_checksum_of_regions_is_the_sum_over_ranks_and_depends_on_every_number():
    boxes = [("a", [(0, 0), (4, 0)], [(4, 8), (4, 8)]), ("b", [()], [()])]
    whole = checksum(boxes)
    first, second = ("a", [(0, 0)], [(4, 8)]), ("a", [(4, 0)], [(4, 8)])
    assert (checksum([second]) + checksum([first, boxes[1]])) % (1 << 64) == whole
    others = [
        [("a", [(0, 0), (4, 1)], [(4, 8), (4, 8)]), boxes[1]],
        [("a", [(0, 0), (4, 0)], [(4, 8), (4, 7)]), boxes[1]],
        [("c", *boxes[0][1:]), boxes[1]],
        boxes[:1],
    ]
    assert len({whole, *map(checksum, others)}) == 5


def test_rank_that_writes_other_regions_than_planned_fails_the_save(tmp_path, monkeypatch):
    from meshwright.core.checkpoint import shards
    from meshwright.errors import CheckpointError

    right = shards.checksum
    monkeypatch.setattr(shards, "checksum", lambda boxes: right(boxes) + (len(list(boxes)) == 4))
    with pytest.raises(CheckpointError, match="the ranks wrote 4 regions, and not the 4 planned"):
        save_on_two_ranks(1, PosixStore(tmp_path), block_sizes=BLOCKS)
    assert list_published(PosixStore(tmp_path)) == []


def test_manifest_has_no_regions_and_no_digests_of_chunks(run):
    values = read_values(newest_folder(run) / MANIFEST_FILE)
    assert set(values["tensors"]["model/weight"]) == {"dtype", "shape"}
    assert set(values["parts"][PARTS[0]]) == {"shard_bytes", "owner", "size", "digest"}
    assert Manifest.decode((newest_folder(run) / MANIFEST_FILE).read_bytes()).step == 2
