"""Tests of meshwright.core.checkpoint.verify and restore: damage at any byte is located, never loaded, and skipped."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import xxhash

from meshwright.base.block_sizes import BlockSizes
from meshwright.base.checkpoint.format.manifest_parts import ManifestPart
from meshwright.base.checkpoint.listing import RunLineage, list_published
from meshwright.base.checkpoint.manifest import MAX_MANIFEST_BYTES, InvalidManifest, Manifest
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.restore import RestoreResult, restore
from meshwright.core.checkpoint.state import CheckpointState, parameters_digest
from meshwright.core.checkpoint.verify import Damage, find_damage
from meshwright.core.parallel.world import World
from meshwright.errors import CheckpointError, IdentityError
from tests.core.checkpoint.checkpoint_fixtures import LINEAGE, digest_at, save_on_two_ranks, state_at

CHUNK = 512
SHARDS = ["rank-00000.shard", "rank-00001.shard"]
PARTS = ["rank-00000.part.json", "rank-00001.part.json"]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, two shards each, and another run with the same steps."""
    root = tmp_path_factory.mktemp("intact")
    for name, lineage in (("run", LINEAGE), ("other", RunLineage("ffff0000", 1, {}))):
        (root / name).mkdir()
        for step in (1, 2):
            save_on_two_ranks(
                step,
                PosixStore(root / name),
                block_sizes=BlockSizes(io_bytes=100, digest_bytes=CHUNK),
                keep=9,
                lineage=lineage,
            )
    return root


@pytest.fixture
def run(intact, tmp_path):
    return shutil.copytree(intact / "run", tmp_path / "run")


@pytest.fixture
def newest(run):
    """The checkpoint folder that the tests damage."""
    return run / "checkpoints" / "step-00000002.a0001"


def damage_of(run) -> list[Damage]:
    """The damage of the newest checkpoint."""
    return find_damage(list_published(PosixStore(run))[0])


def try_restore(
    run, state: CheckpointState, fallback: bool = True, reported: list | None = None
) -> RestoreResult | None:
    on_damaged = (lambda name, damage: reported.append((name, damage))) if reported is not None else lambda *_: None
    return restore(PosixStore(run), World(), LINEAGE, state, lambda _: None, fallback=fallback, on_damaged=on_damaged)


def assert_skipped(run) -> None:
    """The damage is reported and the previous checkpoint is restored; without fallback no tensor is changed."""
    state, reported = state_at(0), []
    result = try_restore(run, state, reported=reported)
    assert result is not None
    assert result.name == "step-00000001.a0001"
    assert parameters_digest(state.items()) == digest_at(1)
    assert [name for name, _ in reported] == ["step-00000002.a0001"]
    assert reported == result.skipped
    state = state_at(0)
    with pytest.raises(CheckpointError, match=r"step-00000002\.a0001 is damaged: ") as raised:
        try_restore(run, state, fallback=False)
    assert raised.value.exit_code == 4
    assert str(reported[0][1][0]) in str(raised.value)
    assert parameters_digest(state.items()) == digest_at(0)


def flip_bit(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def test_undamaged_checkpoint_verifies_and_restores(run):
    assert damage_of(run) == []
    state = state_at(0)
    assert try_restore(run, state).manifest.step == 2
    assert parameters_digest(state.items()) == digest_at(2)
    entry = list_published(PosixStore(run))[0]
    assert min(len(entry.read_part(name).record.chunks) for name in entry.manifest.parts) >= 9


@pytest.mark.parametrize("name", SHARDS)
def test_flipped_bit_in_any_byte_of_a_shard_is_located_by_file_and_chunk(run, newest, name):
    """In the header, the padding, the tensors and the last byte."""
    entry = list_published(PosixStore(run))[0]
    content = (newest / name).read_bytes()
    with open(newest / name, "r+b", buffering=0) as file:
        for position in range(len(content)):
            broken = flip_bit(content, position, position % 8)
            os.pwrite(file.fileno(), broken[position : position + 1], position)
            chunk = position // CHUNK
            (found,) = find_damage(entry)
            assert (found.file, found.chunk) == (name, chunk), position
            assert found.expected == xxhash.xxh3_128_hexdigest(content[chunk * CHUNK : (chunk + 1) * CHUNK])
            assert found.found.startswith(xxhash.xxh3_128_hexdigest(broken[chunk * CHUNK : (chunk + 1) * CHUNK]))
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert not find_damage(entry)


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_in_any_byte_of_a_manifest_is_detected(newest, bit):
    """Bit 5 also changes 1e-08 to 1E-08."""
    content = (newest / "manifest.json").read_bytes()
    assert b"e-08" in content
    for position in range(len(content)):
        with pytest.raises(InvalidManifest, match="the manifest"):
            Manifest.decode(flip_bit(content, position, bit))


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_in_any_byte_of_a_part_is_detected(newest, bit):
    content = (newest / PARTS[0]).read_bytes()
    assert b"0.30000000000000004" in content
    for position in range(len(content)):
        with pytest.raises(InvalidManifest, match="the part"):
            ManifestPart.decode(flip_bit(content, position, bit))


def test_appended_byte_is_detected_in_a_file_that_ends_with_a_chunk(tmp_path, newest):
    store, size = PosixStore(tmp_path / "exact"), (newest / SHARDS[0]).stat().st_size
    os.mkdir(store.root)
    save_on_two_ranks(2, store, block_sizes=BlockSizes(digest_bytes=size))
    assert damage_of(store.root) == []
    with open(store.path(f"checkpoints/{newest.name}/{SHARDS[0]}"), "ab") as file:
        file.write(b"\0")
    (found,) = damage_of(store.root)
    assert (found.file, found.expected, found.found) == (SHARDS[0], f"{size:,} bytes", f"{size + 1:,} bytes")


DAMAGES = {
    "a zeroed page": lambda path: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "a byte shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "a byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit flipped": lambda path: path.write_bytes(flip_bit(path.read_bytes(), path.stat().st_size // 2, 3)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "another format": lambda path: path.write_bytes(b"[" * path.stat().st_size),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", SHARDS + PARTS)
def test_damaged_shard_or_part_is_located_and_the_previous_checkpoint_is_restored(run, newest, name, how):
    DAMAGES[how](newest / name)
    found = damage_of(run)
    assert {damage.file for damage in found} == {name}
    assert all(damage.expected and damage.found and damage.expected != damage.found for damage in found)
    assert_skipped(run)


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "missing"])
def test_damaged_manifest_is_reported_and_the_previous_checkpoint_is_restored(run, newest, how):
    DAMAGES[how](newest / "manifest.json")
    (found,) = damage_of(run)
    assert found.file == "manifest.json"
    assert_skipped(run)


def test_manifest_truncated_at_any_byte_is_invalid(newest):
    content = (newest / "manifest.json").read_bytes()
    for length in range(len(content)):
        with pytest.raises(InvalidManifest):
            Manifest.decode(content[:length])


def test_checkpoint_without_a_manifest_is_not_published(run, newest):
    """It is not damaged, and it is not a candidate for restore."""
    (newest / "manifest.json").unlink()
    assert [entry.step for entry in list_published(PosixStore(run))] == [1]
    assert try_restore(run, state_at(0), fallback=False).manifest.step == 1


def test_manifest_over_the_size_limit_is_not_read(run, newest):
    os.truncate(newest / "manifest.json", MAX_MANIFEST_BYTES + 1)
    (found,) = damage_of(run)
    assert f"more than {MAX_MANIFEST_BYTES:,}" in found.found
    assert_skipped(run)


def test_unlisted_file_is_reported(run, newest):
    (newest / "rank-00002.shard").write_bytes(b"")
    assert [damage.file for damage in damage_of(run)] == ["rank-00002.shard"]
    assert_skipped(run)


def test_shard_of_another_step_is_identified(run, newest):
    shutil.copy(newest.with_name("step-00000001.a0001") / SHARDS[1], newest / SHARDS[1])
    found = damage_of(run)
    assert {damage.file for damage in found} == {SHARDS[1]}
    assert "it is the shard of step 1, attempt 1, rank 1 of run 0123abcd" in found[0].found
    assert_skipped(run)


def test_shard_of_another_run_is_identified(run, newest, intact):
    shutil.copy(intact / "other" / "checkpoints" / newest.name / SHARDS[0], newest / SHARDS[0])
    found = damage_of(run)
    assert {damage.file for damage in found} == {SHARDS[0]}
    assert "it is the shard of step 2, attempt 1, rank 0 of run ffff0000" in found[0].found
    assert_skipped(run)


def test_swapped_shards_are_identified(run, newest):
    one, other = (newest / name for name in SHARDS)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    found = {damage.file: damage.found for damage in reversed(damage_of(run))}
    assert "it is the shard of step 2, attempt 1, rank 1" in found[SHARDS[0]]
    assert "it is the shard of step 2, attempt 1, rank 0" in found[SHARDS[1]]
    assert_skipped(run)


def test_part_of_another_step_is_identified(run, newest):
    shutil.copy(newest.with_name("step-00000001.a0001") / PARTS[1], newest / PARTS[1])
    (found,) = damage_of(run)
    assert found.file == PARTS[1]
    assert "it is the part of step 1, attempt 1, rank 1 of run 0123abcd" in found.found
    assert_skipped(run)


def test_part_of_another_run_is_identified(run, newest, intact):
    shutil.copy(intact / "other" / "checkpoints" / newest.name / PARTS[0], newest / PARTS[0])
    (found,) = damage_of(run)
    assert found.file == PARTS[0]
    assert "it is the part of step 2, attempt 1, rank 0 of run ffff0000" in found.found
    assert_skipped(run)


def test_swapped_parts_are_found(run, newest):
    one, other = (newest / name for name in PARTS)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert [damage.file for damage in damage_of(run)] == PARTS
    assert_skipped(run)


def test_listing_reads_no_part(run, newest):
    for name in PARTS:
        (newest / name).unlink()
    entry = list_published(PosixStore(run))[0]
    assert entry.manifest.total_bytes == sum((newest / name).stat().st_size for name in SHARDS)


@pytest.mark.parametrize("path", ["checkpoints/step-00000009.a0001", "attempts/0007", "checkpoints/notes.txt"])
def test_regular_file_in_place_of_a_folder_is_ignored(run, path):
    (run / path).parent.mkdir(exist_ok=True)
    (run / path).write_text("a note")
    assert [entry.step for entry in list_published(PosixStore(run))] == [2, 1]
    assert try_restore(run, state_at(0)).manifest.step == 2


def test_restore_fails_if_no_checkpoint_is_intact(run, newest):
    for folder in (newest, newest.with_name("step-00000001.a0001")):
        os.truncate(folder / SHARDS[0], 100)
    state, reported = state_at(0), []
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoint.* step-00000002\.a0001: rank-00000\.shard") as end:
        try_restore(run, state, reported=reported)
    assert end.value.exit_code == 4
    assert len(reported) == 2
    assert parameters_digest(state.items()) == digest_at(0)


def test_restore_returns_none_without_checkpoints(tmp_path):
    state = state_at(0)
    assert try_restore(tmp_path, state, fallback=False) is None
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


@pytest.mark.parametrize("message", OTHER_MODELS)
def test_checkpoint_of_another_model_is_rejected_before_any_tensor_changes(run, message):
    state = state_at(0)
    OTHER_MODELS[message](state)
    before = parameters_digest(state.items())
    with pytest.raises(IdentityError) as raised:
        try_restore(run, state)
    assert message in str(raised.value)
    assert parameters_digest(state.items()) == before
