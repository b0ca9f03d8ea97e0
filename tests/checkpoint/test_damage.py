"""Every byte of a checkpoint broken in every way: named where it is, never loaded, and the one before is used."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import xxhash
from small_checkpoints import LINEAGE, digest_at, save_on_two_ranks, state_of

from meshwright.checkpoint.listing import RunLineage, list_published
from meshwright.checkpoint.manifest import MAX_MANIFEST_BYTES, InvalidManifest, Manifest
from meshwright.checkpoint.restore import RestoreResult, restore
from meshwright.checkpoint.state import CheckpointState, parameters_digest
from meshwright.checkpoint.verify import Damage, find_damage
from meshwright.errors import CheckpointError, IdentityError
from meshwright.parallel.world import World
from meshwright.store.posix import PosixStore

CHUNK = 512
SHARDS = ["rank-00000.shard", "rank-00001.shard"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of steps 1 and 2, two shards each, and another run's step 2."""
    root = tmp_path_factory.mktemp("whole")
    for name, lineage in (("run", LINEAGE), ("other", RunLineage("ffff0000", 1, {}))):
        (root / name).mkdir()
        for step in (1, 2):
            save_on_two_ranks(step, PosixStore(root / name), chunk=CHUNK, keep=9, lineage=lineage)
    return root


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole / "run", tmp_path / "run")


@pytest.fixture
def newest(run):
    """The folder that the tests break."""
    return run / "checkpoints" / "step-00000002.a0001"


def found_in(run) -> list[Damage]:
    """What is wrong with the newest checkpoint."""
    return find_damage(list_published(PosixStore(run))[0])


def restored(run, state: CheckpointState, fallback: bool = True, said: list | None = None) -> RestoreResult | None:
    say = (lambda name, found: said.append((name, found))) if said is not None else lambda *_: None
    return restore(PosixStore(run), World(), LINEAGE, state, lambda _: None, fallback=fallback, on_damaged=say)


def assert_passed_over(run) -> None:
    """The damage is said, the checkpoint before is loaded exactly, and without fallback nothing is touched."""
    state, said = state_of(0), []
    result = restored(run, state, said=said)
    assert result is not None
    assert result.name == "step-00000001.a0001"
    assert parameters_digest(state.items()) == digest_at(1)
    assert [name for name, _ in said] == ["step-00000002.a0001"]
    assert said == result.skipped
    state = state_of(0)
    with pytest.raises(CheckpointError, match=r"step-00000002\.a0001 is damaged: ") as refused:
        restored(run, state, fallback=False)
    assert refused.value.exit_code == 4
    assert str(said[0][1][0]) in str(refused.value)
    assert parameters_digest(state.items()) == digest_at(0)


def flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def test_the_checkpoint_that_is_broken_below_is_whole_before(run):
    assert found_in(run) == []
    state = state_of(0)
    assert restored(run, state).manifest.step == 2
    assert parameters_digest(state.items()) == digest_at(2)
    assert min(len(record.chunks) for record in list_published(PosixStore(run))[0].manifest.files.values()) >= 9


@pytest.mark.parametrize("name", SHARDS)
def test_a_flipped_bit_in_each_byte_of_a_shard_names_file_chunk_and_both_digests(run, newest, name):
    """D3: header, padding, tensors, the last byte."""
    entry = list_published(PosixStore(run))[0]
    content = (newest / name).read_bytes()
    with open(newest / name, "r+b", buffering=0) as file:
        for position in range(len(content)):
            broken = flipped(content, position, position % 8)
            os.pwrite(file.fileno(), broken[position : position + 1], position)
            chunk = position // CHUNK
            (found,) = find_damage(entry)
            assert (found.file, found.chunk) == (name, chunk), position
            assert found.expected == xxhash.xxh3_128_hexdigest(content[chunk * CHUNK : (chunk + 1) * CHUNK])
            assert found.found.startswith(xxhash.xxh3_128_hexdigest(broken[chunk * CHUNK : (chunk + 1) * CHUNK]))
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert not find_damage(entry)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(newest, bit):
    """D3, D6. Bit 5 also turns 1e-08 into 1E-08, bit 0 the last digit of a float into one that reads the same."""
    content = (newest / "manifest.json").read_bytes()
    assert b"e-08" in content
    assert b"0.30000000000000004" in content
    for position in range(len(content)):
        with pytest.raises(InvalidManifest, match="the manifest"):
            Manifest.decode(flipped(content, position, bit))


def test_a_file_is_found_to_be_longer_even_where_it_ends_with_a_chunk(tmp_path, newest):
    """D4"""
    store, size = PosixStore(tmp_path / "exact"), (newest / SHARDS[0]).stat().st_size
    os.mkdir(store.root)
    save_on_two_ranks(2, store, chunk=size)
    assert found_in(store.root) == []
    with open(store.path(f"checkpoints/{newest.name}/{SHARDS[0]}"), "ab") as file:
        file.write(b"\0")
    (found,) = found_in(store.root)
    assert (found.file, found.expected, found.found) == (SHARDS[0], f"{size:,} bytes", f"{size + 1:,} bytes")


BROKEN = {
    "a zeroed page": lambda path: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "a byte shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "a byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 2, 3)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "another format": lambda path: path.write_bytes(b"[" * path.stat().st_size),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", SHARDS)
def test_a_broken_shard_is_named_and_the_checkpoint_before_it_is_used(run, newest, name, how):
    """D3, D4, D5"""
    BROKEN[how](newest / name)
    found = found_in(run)
    assert {damage.file for damage in found} == {name}
    assert all(damage.expected and damage.found and damage.expected != damage.found for damage in found)
    assert_passed_over(run)


@pytest.mark.parametrize("how", [how for how in BROKEN if how != "missing"])
def test_a_broken_manifest_is_named_and_the_checkpoint_before_it_is_used(run, newest, how):
    """D3, D4, D6"""
    BROKEN[how](newest / "manifest.json")
    (found,) = found_in(run)
    assert found.file == "manifest.json"
    assert_passed_over(run)


def test_a_manifest_torn_at_any_byte_is_found(newest):
    """D6"""
    content = (newest / "manifest.json").read_bytes()
    for length in range(len(content)):
        with pytest.raises(InvalidManifest):
            Manifest.decode(content[:length])


def test_a_checkpoint_without_its_manifest_was_never_published(run, newest):
    """D5, D6: it is no damage, and no candidate."""
    (newest / "manifest.json").unlink()
    assert [entry.step for entry in list_published(PosixStore(run))] == [1]
    assert restored(run, state_of(0), fallback=False).manifest.step == 1


def test_a_manifest_too_large_to_be_one_is_not_read(run, newest):
    """D6"""
    os.truncate(newest / "manifest.json", MAX_MANIFEST_BYTES + 1)
    (found,) = found_in(run)
    assert f"over {MAX_MANIFEST_BYTES:,}" in found.found
    assert_passed_over(run)


def test_an_extra_file_is_named(run, newest):
    """D5"""
    (newest / "rank-00002.shard").write_bytes(b"")
    assert [damage.file for damage in found_in(run)] == ["rank-00002.shard"]
    assert_passed_over(run)


def test_a_shard_of_another_step_is_named_as_such(run, newest):
    """D5"""
    shutil.copy(newest.with_name("step-00000001.a0001") / SHARDS[1], newest / SHARDS[1])
    found = found_in(run)
    assert {damage.file for damage in found} == {SHARDS[1]}
    assert "it is the shard of step 1, attempt 1, rank 1 of run 0123abcd" in found[0].found
    assert_passed_over(run)


def test_a_shard_of_another_run_is_named_as_such(run, newest, whole):
    """D5"""
    shutil.copy(whole / "other" / "checkpoints" / newest.name / SHARDS[0], newest / SHARDS[0])
    found = found_in(run)
    assert {damage.file for damage in found} == {SHARDS[0]}
    assert "it is the shard of step 2, attempt 1, rank 0 of run ffff0000" in found[0].found
    assert_passed_over(run)


def test_two_shards_that_changed_places_are_named_as_such(run, newest):
    """D5"""
    one, other = (newest / name for name in SHARDS)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    said = {damage.file: damage.found for damage in reversed(found_in(run))}
    assert "it is the shard of step 2, attempt 1, rank 1" in said[SHARDS[0]]
    assert "it is the shard of step 2, attempt 1, rank 0" in said[SHARDS[1]]
    assert_passed_over(run)


@pytest.mark.parametrize("place", ["checkpoints/step-00000009.a0001", "attempts/0007", "checkpoints/notes.txt"])
def test_a_file_where_a_folder_should_be_is_no_checkpoint(run, place):
    """D5"""
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).write_text("a note")
    assert [entry.step for entry in list_published(PosixStore(run))] == [2, 1]
    assert restored(run, state_of(0)).manifest.step == 2


def test_where_no_checkpoint_is_intact_the_run_does_not_begin_anew(run, newest):
    """D3, O4"""
    for folder in (newest, newest.with_name("step-00000001.a0001")):
        os.truncate(folder / SHARDS[0], 100)
    state, said = state_of(0), []
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoint.* step-00000002\.a0001: rank-00000\.shard") as end:
        restored(run, state, said=said)
    assert end.value.exit_code == 4
    assert len(said) == 2
    assert parameters_digest(state.items()) == digest_at(0)


def test_a_run_without_checkpoints_has_nothing_to_restore(tmp_path):
    state = state_of(0)
    assert restored(tmp_path, state, fallback=False) is None
    assert parameters_digest(state.items()) == digest_at(0)


OTHER_MODELS = {
    "optimizer/weight/step is only in the checkpoint": lambda s: s.pop("optimizer/weight/step"),
    "model/new is missing in the checkpoint": lambda s: s.update({"model/new": torch.zeros(2)}),
    "model/weight is float32 [12, 5] in the checkpoint and float32 [5, 12] in the model": lambda s: s.update(
        {"model/weight": torch.zeros(5, 12)}
    ),
    "model/half is bfloat16 [33] in the checkpoint and float16 [33] in the model": lambda s: s.update(
        {"model/half": torch.zeros(33, dtype=torch.float16)}
    ),
}


@pytest.mark.parametrize("why", OTHER_MODELS)
def test_another_model_is_refused_before_any_tensor_is_touched(run, why):
    """C3"""
    state = state_of(0)
    OTHER_MODELS[why](state)
    before = parameters_digest(state.items())
    with pytest.raises(IdentityError) as refused:
        restored(run, state)
    assert why in str(refused.value)
    assert parameters_digest(state.items()) == before
