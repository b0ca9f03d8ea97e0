"""Manifests with a right digest and impossible content: refused as damaged, quickly, with no other kind of error."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from small_checkpoints import LINEAGE, digest_at, save_on_two_ranks, state_of

from meshwright.checkpoint.listing import list_published
from meshwright.checkpoint.manifest import InvalidManifest, Manifest, canonical_digest
from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.state import parameters_digest
from meshwright.checkpoint.verify import find_damage
from meshwright.parallel.world import World
from meshwright.store.posix import PosixStore

SHARD = "rank-00000.shard"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("forged")
    for step in (1, 2):
        save_on_two_ranks(step, PosixStore(root), chunk=512, keep=9)
    return root


@pytest.fixture(scope="module")
def raw(whole):
    return (whole / "checkpoints" / "step-00000002.a0001" / "manifest.json").read_bytes()


def forged(raw: bytes, forge) -> bytes:
    """The manifest with something altered and its digest made right."""
    values = json.loads(raw)
    del values["digest"]
    forge(values)
    return json.dumps(values | {"digest": canonical_digest(values)}, separators=(",", ":")).encode() + b"\n"


def weight(**altered):
    return lambda values: values["tensors"]["model/weight"].update(altered)


def piece(**altered):
    return lambda values: values["tensors"]["model/weight"]["pieces"][0].update(altered)


def shard(**altered):
    return lambda values: values["files"][SHARD].update(altered)


def field(**altered):
    return lambda values: values.update(altered)


def renamed(name):
    """A file, and the pieces in it, under a name that leads elsewhere."""

    def forge(values):
        values["files"][name] = values["files"].pop(SHARD)
        for tensor in values["tensors"].values():
            for one in tensor["pieces"]:
                one["file"] = name if one["file"] == SHARD else one["file"]

    return forge


def overlapping(values):
    """Twelve rows in two pieces of six, of which row 5 is in both and row 11 in neither."""
    tensor = values["tensors"]["model/weight"]
    (one,) = tensor["pieces"]
    half = one | {"shape": [6, 5], "length": one["length"] // 2}
    tensor["pieces"] = [half, half | {"offset": [5, 0]}]


FORGED = {
    "a name above the folder": renamed("../x"),
    "a name above the folder, deeper": renamed("a/../../x"),
    "an absolute name": renamed("/etc/passwd"),
    "a name in a folder": renamed("a/b"),
    "a hidden name": renamed(".x"),
    "no name": renamed(""),
    "a name with a line's end": renamed("x\n"),
    "the manifest's own name": renamed("manifest.json"),
    "a negative start": piece(start=-1),
    "a negative offset": piece(offset=[-1, 0]),
    "a negative length": piece(length=-4),
    "an offset of too few": piece(offset=[0]),
    "an offset outside": piece(offset=[1, 0]),
    "a start that is a fraction": piece(start=4096.0),
    "a start that is a truth": piece(start=True),
    "a start that is a word": piece(start="4096"),
    "a start beyond the file": piece(start=2**60),
    "a piece in an unknown file": piece(file="rank-00007.shard"),
    "a piece in a list": piece(file=[SHARD]),
    "a piece in nothing": piece(file=None),
    "a piece too short": piece(length=4),
    "a piece of another shape": piece(shape=[12, 4]),
    "a huge shape": weight(shape=[2**40, 2**40]),
    "a huge shape, in pieces too": lambda v: (weight(shape=[2**62, 5])(v), piece(shape=[2**62, 5])(v)),
    "a shape of negatives": weight(shape=[-12, -5]),
    "a shape of words": weight(shape=["12", "5"]),
    "a shape of words, no pieces": weight(shape=["a", "b"], pieces=[]),
    "a negative shape of nothing": weight(shape=[-1, 0], pieces=[]),
    "a fractional shape of nothing": weight(shape=[0.0], pieces=[]),
    "a shape of lists": weight(shape=[[12], [5]]),
    "a shape that is a number": weight(shape=60),
    "no pieces": weight(pieces=[]),
    "the same piece twice": lambda v: v["tensors"]["model/weight"].update(
        shape=[24, 5], pieces=v["tensors"]["model/weight"]["pieces"] * 2
    ),
    "pieces that overlap": overlapping,
    "pieces that are numbers": weight(pieces=[1, 2]),
    "an unknown dtype": weight(dtype="complex64"),
    "a dtype that is code": weight(dtype="__class__"),
    "a dtype in a list": weight(dtype=["float32"]),
    "no dtype": weight(dtype=None),
    "a file of negative size": shard(size=-1, chunks=[]),
    "a file of fractional size": shard(size=4096.5),
    "a huge file": shard(size=2**60),
    "a file with a digest too few": lambda v: v["files"][SHARD]["chunks"].pop(),
    "a file with digests that are numbers": lambda v: shard(chunks=[1] * len(v["files"][SHARD]["chunks"]))(v),
    "a file that is a list": field(files={SHARD: []}),
    "files in a list": field(files=[]),
    "tensors in a list": field(tensors=[]),
    "a tensor that is nothing": field(tensors={"model/weight": None}),
    "chunks of nothing": field(chunk=0),
    "chunks larger than memory": field(chunk=2**40),
    "a negative step": field(step=-1),
    "a step that is a truth": field(step=True),
    "a step in words": field(step="2"),
    "another step": field(step=3),
    "another attempt": field(attempt=2),
    "format 0": field(format=0),
    "format 2": field(format=2),
    "a format in words": field(format="1"),
    "a format that is a truth": field(format=True),
    "no format": lambda v: v.pop("format"),
    "no parent": lambda v: v.pop("parent"),
    "a field more": field(colour="blue"),
    "a run that is a number": field(run=5),
    "a parent that is a list": field(parent=[]),
    "an identity that is a list": field(identity=[]),
    "data that is nothing": field(data=None),
    "owners that are words": field(owners={"0": "x"}),
    "random numbers that are words": field(rng={"0": "x"}),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", FORGED)
def test_a_forged_manifest_is_damaged_and_the_checkpoint_before_it_is_used(whole, raw, tmp_path, how):
    """D6, C8 (formats 0 and 2 are refused), O4"""
    store = PosixStore(shutil.copytree(whole, tmp_path / "run"))
    path = tmp_path / "run" / "checkpoints" / "step-00000002.a0001" / "manifest.json"
    path.write_bytes(forged(raw, FORGED[how]))
    entry = list_published(store)[0]
    assert entry.manifest is None
    assert entry.problem
    assert [damage.file for damage in find_damage(entry)] == ["manifest.json"]
    state, said = state_of(0), []
    found = restore(
        store, World(), LINEAGE, state, lambda _: None, fallback=True, on_damaged=lambda *told: said.append(told)
    )
    assert found.manifest.step == 1
    assert parameters_digest(state.items()) == digest_at(1)
    assert said[0][0] == entry.name


def test_the_manifest_that_is_forged_above_is_good_before(raw):
    assert forged(raw, lambda _: None) == raw
    assert Manifest.decode(raw).step == 2


def test_a_field_altered_in_valid_json_is_found_by_the_digest(raw):
    """D6"""
    for key, value in json.loads(raw).items():
        altered = json.loads(raw) | {key: [value]}
        with pytest.raises(InvalidManifest, match="the manifest records digest"):
            Manifest.decode(json.dumps(altered, separators=(",", ":")).encode() + b"\n")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"[]", b"null", b"1", b'"digest"', b"[{}]", b"\xff\xfe", b"NaN"]
)
def test_what_is_no_manifest_at_all_is_damaged(content):
    """D6"""
    with pytest.raises(InvalidManifest):
        Manifest.decode(content)


def test_json_nested_to_any_depth_is_damaged_and_nothing_worse(raw):
    """D6: at each depth around what the interpreter bears."""
    for depth in (*range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 20), 10**6):
        nested = b"[" * depth + b"]" * depth
        with pytest.raises(InvalidManifest):
            Manifest.decode(b'{"data":' + nested + b',"digest":"0"}')


@pytest.mark.timeout(5)
def test_numbers_without_end_are_damaged_quickly(raw):
    """D6"""
    with pytest.raises(InvalidManifest):
        Manifest.decode(raw.replace(b'"step":2', b'"step":' + b"9" * 10**6))
    with pytest.raises(InvalidManifest):
        Manifest.decode(forged(raw, weight(shape=[2**60] * 150_000, pieces=[])))
