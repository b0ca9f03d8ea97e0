"""Damages published checkpoints on disk, each in another way: a bit, a header, a manifest, a size, a missing file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.prover.state.checkpoint_content import CheckpointContent


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that must never be loaded."""

    name: str
    files: tuple[str, ...]
    """the files that a report may name"""
    what: str


def damage_checkpoints(contents: list[CheckpointContent]) -> list[DamagedCheckpoint]:
    """Damages the newest checkpoints, each in one way; `contents` is ordered from old to new and longer than `DAMAGES`,
    so that the oldest ones stay intact.
    """
    ways = [*DAMAGES.items()]
    if len(contents[0].manifest["files"]) < 2:
        ways = [(what, way) for what, way in ways if way is not swap_shards]
    damaged = []
    for index, (what, way) in enumerate(ways):
        content = contents[-1 - index]
        files = way(content, contents[0])
        damaged.append(DamagedCheckpoint(content.folder.name, files, what))
    return damaged


def flip_tensor_bit(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    """The last byte of the last shard: a digest that covers the first chunk or the first file alone misses it."""
    path = shards(content)[-1]
    return flip(path, path.stat().st_size - 1)


def flip_header_bit(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    return flip(shards(content)[0], 30)


def flip_padding_bit(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    """A byte of the header that no field uses."""
    return flip(shards(content)[0], 4000)


def flip_manifest_bit(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    """A digit of a counter: the manifest remains valid JSON."""
    path = content.folder / "manifest.json"
    return flip(path, path.read_bytes().index(b'"skipped":') + len('"skipped":'))


def flip_part_bit(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    """A digit of the size of the shard."""
    path = parts(content)[-1]
    return flip(path, path.read_bytes().index(b'"size":') + len('"size":'))


def replace_by_older_part(content: CheckpointContent, older: CheckpointContent) -> tuple[str, ...]:
    """A valid part of the same rank, of another step."""
    path = parts(content)[-1]
    shutil.copyfile(older.folder / path.name, path)
    return (path.name,)


def truncate_shard(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    path = shards(content)[-1]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    return (path.name,)


def remove_shard(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    path = shards(content)[-1]
    path.unlink()
    return (path.name,)


def swap_shards(content: CheckpointContent, _older: CheckpointContent) -> tuple[str, ...]:
    first, *_, last = shards(content)
    held = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(held)
    return first.name, last.name


def replace_by_older_shard(content: CheckpointContent, older: CheckpointContent) -> tuple[str, ...]:
    """A shard of the same size, of the same rank, of another step."""
    path = shards(content)[-1]
    shutil.copyfile(older.folder / path.name, path)
    return (path.name,)


DAMAGES: dict[str, Callable[[CheckpointContent, CheckpointContent], tuple[str, ...]]] = {
    "one flipped bit in a tensor": flip_tensor_bit,
    "one flipped bit in the header of a shard": flip_header_bit,
    "one flipped bit in unused bytes of a header": flip_padding_bit,
    "one flipped bit in the manifest": flip_manifest_bit,
    "one flipped bit in a part of the manifest": flip_part_bit,
    "a part of the manifest of another step": replace_by_older_part,
    "a shard that lost its last byte": truncate_shard,
    "a missing shard": remove_shard,
    "shards of two ranks that were swapped": swap_shards,
    "a shard of another step": replace_by_older_shard,
}


def shards(content: CheckpointContent) -> list[Path]:
    return sorted(content.folder.glob("rank-*.shard"))


def parts(content: CheckpointContent) -> list[Path]:
    return sorted(content.folder.glob("rank-*.part.json"))


def flip(path: Path, position: int) -> tuple[str, ...]:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    return (path.name,)
