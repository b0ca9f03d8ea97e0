"""Manifests of format 1: forged content with a correct digest is always an InvalidManifest."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from meshwright.base.block_sizes import BlockSizes
from meshwright.base.checkpoint.listing import list_published
from meshwright.base.checkpoint.manifest import InvalidManifest, Manifest, canonical_digest
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.state import parameters_digest
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.parallel.world import World
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, as_format_1, digest_at, save_on_two_ranks, state_at

SHARD = "rank-00000.shard"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    root = tmp_path_factory.mktemp("forged")
    for step in (1, 2):
        save_on_two_ranks(step, PosixStore(root), block_sizes=BlockSizes(digest_bytes=512), keep=9)
        as_format_1(root / "checkpoints" / f"step-{step:08d}.a0001")
    return root


@pytest.fixture(scope="module")
def raw(intact):
    return (intact / "checkpoints" / "step-00000002.a0001" / "manifest.json").read_bytes()


def forge_manifest(raw: bytes, forge) -> bytes:
    """The manifest with an altered value and a correct digest."""
    values = json.loads(raw)
    del values["digest"]
    forge(values)
    return json.dumps(values | {"digest": canonical_digest(values)}, separators=(",", ":")).encode() + b"\n"


def weight(**altered):
    return lambda values: values["tensors"]["model/weight"].update(altered)


def region(**altered):
    return lambda values: values["tensors"]["model/weight"]["pieces"][0].update(altered)


def shard(**altered):
    return lambda values: values["files"][SHARD].update(altered)


def field(**altered):
    return lambda values: values.update(altered)


def renamed(name):
    """A file under another name, with the regions in it."""

    def forge(values):
        values["files"][name] = values["files"].pop(SHARD)
        for tensor in values["tensors"].values():
            for record in tensor["pieces"]:
                record["file"] = name if record["file"] == SHARD else record["file"]

    return forge


def overlapping(values):
    """Twelve rows in two regions of six rows: row 5 is in both and row 11 in neither."""
    tensor = values["tensors"]["model/weight"]
    (full,) = tensor["pieces"]
    half = full | {"shape": [6, 5], "length": full["length"] // 2}
    tensor["pieces"] = [half, half | {"offset": [5, 0]}]


FORGED = {
    "a name above the folder": renamed("../x"),
    "a name above the folder, deeper": renamed("a/../../x"),
    "an absolute name": renamed("/etc/passwd"),
    "a name in a folder": renamed("a/b"),
    "a hidden name": renamed(".x"),
    "no name": renamed(""),
    "a name with a newline": renamed("x\n"),
    "the name of the manifest": renamed("manifest.json"),
    "a negative start": region(start=-1),
    "a negative offset": region(offset=[-1, 0]),
    "a negative length": region(length=-4),
    "an offset with too few dimensions": region(offset=[0]),
    "an offset outside": region(offset=[1, 0]),
    "a start that is a fraction": region(start=4096.0),
    "a start that is a bool": region(start=True),
    "a start that is a string": region(start="4096"),
    "a start beyond the file": region(start=2**60),
    "a region in an unknown file": region(file="rank-00007.shard"),
    "a file name that is a list": region(file=[SHARD]),
    "a file name that is null": region(file=None),
    "a region that is too short": region(length=4),
    "a region of another shape": region(shape=[12, 4]),
    "a huge shape": weight(shape=[2**40, 2**40]),
    "a huge shape, in regions too": lambda v: (weight(shape=[2**62, 5])(v), region(shape=[2**62, 5])(v)),
    "a shape of negatives": weight(shape=[-12, -5]),
    "a shape of strings": weight(shape=["12", "5"]),
    "a shape of strings, no regions": weight(shape=["a", "b"], pieces=[]),
    "a negative shape, no regions": weight(shape=[-1, 0], pieces=[]),
    "a fractional shape, no regions": weight(shape=[0.0], pieces=[]),
    "a shape of lists": weight(shape=[[12], [5]]),
    "a shape that is a number": weight(shape=60),
    "no regions": weight(pieces=[]),
    "the same region twice": lambda v: v["tensors"]["model/weight"].update(
        shape=[24, 5], pieces=v["tensors"]["model/weight"]["pieces"] * 2
    ),
    "regions that overlap": overlapping,
    "regions that are numbers": weight(pieces=[1, 2]),
    "an unknown dtype": weight(dtype="complex64"),
    "a dtype that is code": weight(dtype="__class__"),
    "a dtype in a list": weight(dtype=["float32"]),
    "no dtype": weight(dtype=None),
    "a file of negative size": shard(size=-1, chunks=[]),
    "a file of fractional size": shard(size=4096.5),
    "a huge file": shard(size=2**60),
    "a file with a missing digest": lambda v: v["files"][SHARD]["chunks"].pop(),
    "a file with digests that are numbers": lambda v: shard(chunks=[1] * len(v["files"][SHARD]["chunks"]))(v),
    "a file that is a list": field(files={SHARD: []}),
    "files in a list": field(files=[]),
    "tensors in a list": field(tensors=[]),
    "a tensor that is null": field(tensors={"model/weight": None}),
    "chunks of zero bytes": field(chunk=0),
    "chunks larger than memory": field(chunk=2**40),
    "a negative step": field(step=-1),
    "a step that is a bool": field(step=True),
    "a step that is a string": field(step="2"),
    "another step": field(step=3),
    "another attempt": field(attempt=2),
    "format 0": field(format=0),
    "format 2": field(format=2),
    "format 3": field(format=3),
    "parts": field(parts={}),
    "more owners than files": field(owners={str(rank): {} for rank in range(3)}),
    "a format that is a string": field(format="1"),
    "a format that is a bool": field(format=True),
    "no format": lambda v: v.pop("format"),
    "no parent": lambda v: v.pop("parent"),
    "an unknown field": field(colour="blue"),
    "a run that is a number": field(run=5),
    "a parent that is a list": field(parent=[]),
    "an identity that is a list": field(identity=[]),
    "data that is null": field(data=None),
    "an owner that is a string": field(owners={"0": "x"}),
    "a seed that is a string": field(rng={"0": "x"}),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", FORGED)
def test_forged_manifest_is_invalid_and_the_previous_checkpoint_is_restored(intact, raw, tmp_path, how):
    store = PosixStore(shutil.copytree(intact, tmp_path / "run"))
    path = tmp_path / "run" / "checkpoints" / "step-00000002.a0001" / "manifest.json"
    path.write_bytes(forge_manifest(raw, FORGED[how]))
    entry = list_published(store)[0]
    assert entry.manifest is None
    assert entry.problem
    assert [damage.file for damage in find_damage(entry)] == ["manifest.json"]
    state, reported = state_at(0), []
    found = restore(
        store, World(), LINEAGE, state, lambda _: None, fallback=True, on_damaged=lambda *args: reported.append(args)
    )
    assert found.manifest.step == 1
    assert parameters_digest(state.items()) == digest_at(1)
    assert reported[0][0] == entry.name


def test_unchanged_manifest_is_valid(raw):
    assert forge_manifest(raw, lambda _: None) == raw
    assert Manifest.decode(raw).step == 2


def test_digest_detects_an_altered_field(raw):
    for key, value in json.loads(raw).items():
        altered = json.loads(raw) | {key: [value]}
        with pytest.raises(InvalidManifest, match="the manifest records digest"):
            Manifest.decode(json.dumps(altered, separators=(",", ":")).encode() + b"\n")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"[]", b"null", b"1", b'"digest"', b"[{}]", b"\xff\xfe", b"NaN"]
)
def test_content_that_is_not_a_manifest_is_invalid(content):
    with pytest.raises(InvalidManifest):
        Manifest.decode(content)


def test_deeply_nested_json_is_an_invalid_manifest(raw):
    """At every depth around the recursion limit of the interpreter."""
    for depth in (*range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 20), 10**6):
        nested = b"[" * depth + b"]" * depth
        with pytest.raises(InvalidManifest):
            Manifest.decode(b'{"data":' + nested + b',"digest":"0"}')


@pytest.mark.timeout(5)
def test_huge_numbers_are_an_invalid_manifest(raw):
    with pytest.raises(InvalidManifest):
        Manifest.decode(raw.replace(b'"step":2', b'"step":' + b"9" * 10**6))
    with pytest.raises(InvalidManifest):
        Manifest.decode(forge_manifest(raw, weight(shape=[2**60] * 150_000, pieces=[])))
