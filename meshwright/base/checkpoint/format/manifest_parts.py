"""The parts of a manifest: what each rank records, beside its shard, of the shard and of the state that it owns.

A part is an untrusted file like the manifest, which has the size and the digest of every part. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.base.checkpoint.format.canonical import InvalidManifest, canonical_digest, parse, serialize
from meshwright.base.checkpoint.format.regions import MAX_INTEGER, TensorRecord, TensorRegion

FORMAT = 2
"""The version of the keys of a manifest and of its parts. A change of a key needs a new version and a new fixture in
tests/checkpoint.
"""
MAX_PART_BYTES = 32 << 20
"""The size limit of one part: about 200,000 regions, or a shard of 7 TB."""
MAX_PARTS_BYTES = 4 << 30
"""The size limit of all parts of a checkpoint."""


def shard_file(rank: int) -> str:
    return f"rank-{rank:05d}.shard"


def part_file(rank: int) -> str:
    return f"rank-{rank:05d}.part.json"


@dataclass(frozen=True)
class ShardOrigin:
    """Which rank wrote a shard and its part, at which step and attempt of which run."""

    run: str
    timeline: int
    step: int
    attempt: int
    rank: int

    def __str__(self) -> str:
        return f"step {self.step}, attempt {self.attempt}, rank {self.rank} of run {self.run}"


@dataclass(frozen=True)
class FileRecord:
    """The size of a file and the digests of its chunks."""

    size: int
    chunks: tuple[str, ...]
    """The xxh3-128 digest of each `Manifest.chunk` bytes."""

    def validate(self, name: str, chunk: int) -> None:
        """Raise InvalidManifest unless there is one digest per `chunk` bytes."""
        if not all(type(digest) is str for digest in self.chunks):
            raise InvalidManifest(f"the manifest has an invalid digest for {name}")
        if type(self.size) is not int or not 0 <= self.size < MAX_INTEGER or len(self.chunks) != -(-self.size // chunk):
            raise InvalidManifest(f"the manifest has {len(self.chunks)} digests for {self.size} bytes of {name}")


@dataclass(frozen=True)
class RecordedPart:
    """What the manifest has of a part."""

    rank: int
    """The rank that wrote it."""
    file: str
    """The name of the shard that the part describes."""
    shard_bytes: int
    """The size of the shard."""
    owner: str
    """The logical owner whose non-tensor state the part has."""
    size: int = 0
    """The size of the part; 0 if it is in the manifest itself, as in format 1."""
    digest: str = ""
    """The digest of the part."""


class InvalidPart(InvalidManifest):
    """A part that is not the one that the manifest records."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        super().__init__(f"{name}: expected {expected}, found {found}")
        self.name, self.expected, self.found = name, expected, found


@dataclass(frozen=True)
class ManifestPart:
    """The content of one part."""

    origin: ShardOrigin
    file: str
    record: FileRecord
    owner: str
    state: dict[str, Any]
    """The non-tensor state of the owner."""
    regions: dict[str, tuple[TensorRegion, ...]]
    """The regions that the shard stores, by the name of their tensor."""

    def encode(self) -> bytes:
        """The content of the file, with its own digest as the last key."""
        regions = {
            name: [{key: value for key, value in vars(region).items() if key != "file"} for region in of_tensor]
            for name, of_tensor in self.regions.items()
        }
        shard = {"file": self.file, "size": self.record.size, "chunks": self.record.chunks}
        owned = {"owner": self.owner, "state": self.state}
        values = {"format": FORMAT} | asdict(self.origin) | shard | owned | {"tensors": regions}
        return serialize(values, canonical_digest(values))

    @classmethod
    def decode(cls, raw: bytes) -> tuple[ManifestPart, str]:
        """A part and its digest. Raises InvalidManifest unless every byte is as it was written and no field is missing
        or unknown.
        """
        values, digest = parse(raw, "the part")
        if type(values.get("format")) is not int or values.pop("format") != FORMAT:
            raise InvalidManifest("the part has an unknown format")
        try:
            origin = ShardOrigin(*(values.pop(key) for key in ("run", "timeline", "step", "attempt", "rank")))
            file, record = values.pop("file"), FileRecord(values.pop("size"), tuple(values.pop("chunks")))
            owner, state, tensors = (values.pop(key) for key in ("owner", "state", "tensors"))
            regions = {name: tuple(decode_region(region, file) for region in found) for name, found in tensors.items()}
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise InvalidManifest(f"the part has a missing or unknown field: {error}") from None
        if values:
            raise InvalidManifest(f"the part has an unknown field: {next(iter(values))[:100]}")
        return cls(origin, file, record, owner, state, regions), digest

    def validate(self, tensors: Mapping[str, TensorRecord], chunk: int) -> None:
        """Raise InvalidManifest unless the regions are of known tensors, inside of them and inside of the shard."""
        if type(self.owner) is not str or type(self.state) is not dict:
            raise InvalidManifest("the part has an invalid owner")
        self.record.validate(self.file, chunk)
        for name, regions in self.regions.items():
            if name not in tensors:
                raise InvalidManifest(f"tensor {name} is not in the manifest")
            for region in regions:
                region.validate(name, tensors[name], self.record.size)

    def rows(self, part: int, tensors: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """The rows of a region table: `part` and `tensors` are the numbers of the part and of every tensor."""
        for name, regions in self.regions.items():
            for region in regions:
                yield part, tensors[name], region.start, *region.offset, *region.shape


def decode_region(values: dict[str, Any], file: str) -> TensorRegion:
    if len(values) != 4:
        raise KeyError("expected offset, shape, start and length of a region")
    return TensorRegion(tuple(values["offset"]), tuple(values["shape"]), file, values["start"], values["length"])
