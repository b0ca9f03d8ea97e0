"""The manifest: what a checkpoint contains, and the digest of every part that says where. Torch-free.

A checkpoint exists if and only if its manifest does. The manifest has what is global, and names one part per rank
(manifest_parts.py), so that it stays small at thousands of ranks. It is an untrusted file: its size is bounded, every
field is validated, it names no file outside of its own folder, and it includes a digest of itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from meshwright.base.block_sizes import BLOCK_SIZES
from meshwright.base.checkpoint.format.canonical import InvalidManifest, parse, serialize
from meshwright.base.checkpoint.format.canonical import canonical_digest as canonical_digest
from meshwright.base.checkpoint.format.format_1 import split_format_1
from meshwright.base.checkpoint.format.manifest_parts import (
    FORMAT,
    MAX_PART_BYTES,
    MAX_PARTS_BYTES,
    ManifestPart,
    RecordedPart,
    part_file,
    shard_file,
)
from meshwright.base.checkpoint.format.regions import MAX_INTEGER, RegionTable, TensorRecord

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. A manifest of format 1 is decoded into the same fields, with its parts."""

    run: str
    """The id of the run."""
    timeline: int
    """The timeline of the run: a fork begins a new one."""
    step: int
    """The number of completed optimizer steps."""
    attempt: int
    """The attempt that wrote the checkpoint: its fencing epoch."""
    ordinal: int
    """The number of earlier checkpoints in this lineage."""
    parent: str
    """The digest of the previous checkpoint, '' for the first."""
    layout: dict[str, int]
    """The degree of every parallel axis, and the micro-batch."""
    identity: dict[str, Any]
    """The identity of the run."""
    made_by: dict[str, Any]
    """What may change bits without being identity: versions, device, threads."""
    data: dict[str, Any]
    """The position in the sample stream."""
    rng: dict[str, int]
    """The seed of the next step's random generator, by data-parallel rank."""
    schedule: dict[str, Any]
    """The state of the learning-rate schedule."""
    scaler: dict[str, Any]
    """The state of the gradient scaler."""
    counters: dict[str, Any]
    """The counters of the step recorder."""
    tensors: dict[str, TensorRecord]
    """The dtype and the full shape of every tensor, by name."""
    parts: dict[str, RecordedPart]
    """The parts by file name, in the order of the ranks that wrote them."""
    format: int = FORMAT
    chunk: int = BLOCK_SIZES.digest_bytes
    """The number of bytes that one digest covers."""
    base: dict[str, Any] = field(default_factory=dict)
    """The frozen parameters, which the checkpoint does not contain: `digest`, and `weights`, where a run reads them.
    The key is left out where all parameters are in the checkpoint.
    """
    digest: str = field(default="", compare=False)
    """The digest of the manifest itself."""
    embedded: dict[str, ManifestPart] = field(default_factory=dict, compare=False)
    """The parts that are in the manifest itself: those of format 1, by the name of their shard."""

    @property
    def total_bytes(self) -> int:
        return sum(part.shard_bytes for part in self.parts.values())

    @cached_property
    def tensor_numbers(self) -> dict[str, int]:
        """The number of every tensor, in the order of the manifest."""
        return {name: number for number, name in enumerate(self.tensors)}

    def encode(self) -> bytes:
        """The content of the file, with its own digest as the last key."""
        keys = (key.name for key in fields(self) if key.name not in ("digest", "embedded"))
        values = {key: getattr(self, key) for key in keys}
        if not self.base:
            del values["base"]
        values["tensors"] = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        values["parts"] = {
            name: {key: value for key, value in asdict(part).items() if key not in ("rank", "file")}
            for name, part in self.parts.items()
        }
        return serialize(values, canonical_digest(values))

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Parse a file. Raises InvalidManifest unless every byte is as it was written and every field is valid."""
        values, digest = parse(raw, "the manifest")
        if type(values.get("format")) is not int or values["format"] not in (1, FORMAT):
            raise InvalidManifest(
                f"the manifest has format {values.get('format')}, this version reads formats 1 and {FORMAT}"
            )
        try:
            embedded = {part.file: part for part in split_format_1(values)} if values["format"] == 1 else {}
            records = {
                file: RecordedPart(part.origin.rank, file, part.record.size, part.owner)
                for file, part in embedded.items()
            }
            if values["format"] != 1:
                parts = enumerate(values.pop("parts").items())
                records = {name: RecordedPart(rank, shard_file(rank), **part) for rank, (name, part) in parts}
            tensors = {
                name: TensorRecord(tensor.pop("dtype"), tuple(tensor.pop("shape")))
                for name, tensor in values["tensors"].items()
            }
            unknown = next((key for tensor in values.pop("tensors").values() for key in tensor), None)
            if unknown is not None:
                raise KeyError(unknown)
            manifest = cls(**values, tensors=tensors, parts=records, digest=digest, embedded=embedded)
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidManifest(f"the manifest has a missing or unknown field: {error}") from None
        manifest.validate()
        return manifest

    def validate(self) -> None:
        """Raise InvalidManifest unless every field has a possible value."""
        counts = (self.timeline, self.step, self.attempt, self.ordinal, self.chunk)
        if not all(type(n) is int and n >= 0 for n in counts) or not 1 <= self.chunk <= 1 << 30:
            raise InvalidManifest("the manifest has a number out of range")
        tables = [self.layout, self.identity, self.made_by, self.data, self.rng, self.schedule, self.scaler]
        tables += [self.counters, self.base]
        if (
            not all(type(table) is dict for table in tables)
            or type(self.run) is not str
            or type(self.parent) is not str
        ):
            raise InvalidManifest("the manifest has a field of the wrong type")
        if not all(type(n) is int for n in self.rng.values()):
            raise InvalidManifest("the manifest has an invalid entry in rng")
        if not all(type(text) is str for text in self.base.values()):
            raise InvalidManifest("the manifest has an invalid entry in base")
        for name, tensor in self.tensors.items():
            tensor.validate(name)
        if self.format == FORMAT:
            self._validate_parts()
        for part in self.embedded.values():
            part.validate(self.tensors, self.chunk)
        if self.format == 1:
            regions = [self.index_regions(name, part) for name, part in self.embedded.items()]
            RegionTable.merge(regions).validate(self.tensors)

    def index_regions(self, name: str, part: ManifestPart) -> RegionTable:
        """The regions of a part. A row has the rank of the part and the number of its tensor."""
        return RegionTable.from_rows(part.rows(self.parts[name].rank, self.tensor_numbers))

    def _validate_parts(self) -> None:
        """Every rank from 0 on has one part, under the one name that it may have."""
        for rank, (name, part) in enumerate(self.parts.items()):
            if name != part_file(rank):
                raise InvalidManifest(f"the manifest has {name[:100]!r} as the part of rank {rank}")
            numbers = (part.size, part.shard_bytes)
            if not all(type(n) is int and 0 <= n < MAX_INTEGER for n in numbers) or part.size > MAX_PART_BYTES:
                raise InvalidManifest(f"the manifest has an invalid size of {name}")
            if type(part.digest) is not str or type(part.owner) is not str:
                raise InvalidManifest(f"the manifest has an invalid record of {name}")
        if (total := sum(part.size for part in self.parts.values())) > MAX_PARTS_BYTES:
            raise InvalidManifest(f"the parts have {total:,} bytes, more than {MAX_PARTS_BYTES:,}")
