"""The manifest: what a checkpoint contains, where every tensor is stored, and the digest of every byte. Torch-free.

A checkpoint exists if and only if its manifest does. A manifest is an untrusted file: its size is bounded, every field
is validated, it names no file outside of its own folder, and it includes a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from meshwright.config import BLOCK_SIZES
from meshwright.config.dtypes import TENSOR_BYTES

FORMAT = 1
"""The version of the manifest's keys. A change of a key needs a new version and a new fixture in tests/checkpoint."""
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor."""


class InvalidManifest(Exception):
    """A manifest that cannot be trusted; the text gives the reason."""


@dataclass(frozen=True)
class TensorRegion:
    """A rectangular region of a tensor, and the byte range of a file that stores it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the checkpoint as the regions that its shards store."""

    dtype: str
    shape: tuple[int, ...]
    regions: tuple[TensorRegion, ...]
    """The regions; their JSON key is `pieces`."""


@dataclass(frozen=True)
class FileRecord:
    """The size of a file and the digests of its chunks."""

    size: int
    chunks: tuple[str, ...]
    """The xxh3-128 digest of each `Manifest.chunk` bytes."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

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
    owners: dict[str, dict[str, Any]]
    """Non-tensor state that belongs to one data-parallel rank, by owner."""
    files: dict[str, FileRecord]
    """The shards, by file name."""
    tensors: dict[str, TensorRecord]
    """The tensors, by name."""
    format: int = FORMAT
    chunk: int = BLOCK_SIZES.digest_bytes
    """The number of bytes that one digest covers."""
    base: dict[str, Any] = field(default_factory=dict)
    """The frozen parameters, which the checkpoint does not contain: `digest`, and `weights`, where a run reads them.
    The key is left out where all parameters are in the checkpoint.
    """
    digest: str = field(default="", compare=False)
    """The digest of the manifest itself."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """The content of the file, with its own digest as the last key."""
        values = asdict(self)
        del values["digest"]
        if not self.base:
            del values["base"]
        for tensor in values["tensors"].values():
            tensor["pieces"] = tensor.pop("regions")
        return serialize(values, canonical_digest(values))

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Parse a file. Raises InvalidManifest unless every byte is as it was written and every field is valid."""
        try:
            values = json.loads(raw)
            recorded = values.pop("digest")
            computed, expected_bytes = canonical_digest(values), serialize(values, recorded)
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise InvalidManifest("the manifest is not a complete JSON object with a digest") from None
        if computed != recorded:
            raise InvalidManifest(f"the manifest records digest {str(recorded)[:16]}, its content has {computed[:16]}")
        if expected_bytes != raw:  # such as 1e-8 in place of 1e-08: equal values, different bytes
            raise InvalidManifest("the bytes of the manifest are not those that were written")
        if type(values.get("format")) is not int or values["format"] != FORMAT:
            raise InvalidManifest(f"the manifest has format {values.get('format')}, this version reads format {FORMAT}")
        try:
            files = {name: FileRecord(f["size"], tuple(f["chunks"])) for name, f in values.pop("files").items()}
            tensors = {
                name: TensorRecord(
                    t["dtype"],
                    tuple(t["shape"]),
                    tuple(
                        TensorRegion(tuple(r["offset"]), tuple(r["shape"]), r["file"], r["start"], r["length"])
                        for r in t["pieces"]
                    ),
                )
                for name, t in values.pop("tensors").items()
            }
            manifest = cls(**values, files=files, tensors=tensors, digest=recorded)
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
        tables += [self.counters, self.owners, self.base]
        if (
            not all(type(table) is dict for table in tables)
            or type(self.run) is not str
            or type(self.parent) is not str
        ):
            raise InvalidManifest("the manifest has a field of the wrong type")
        if not all(type(n) is int for n in self.rng.values()) or not all(type(o) is dict for o in self.owners.values()):
            raise InvalidManifest("the manifest has an invalid entry in rng or owners")
        if not all(type(text) is str for text in self.base.values()):
            raise InvalidManifest("the manifest has an invalid entry in base")
        for name, record in self.files.items():
            if not all(type(chunk) is str for chunk in record.chunks):
                raise InvalidManifest(f"the manifest has an invalid digest for {name}")
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or name == MANIFEST_FILE:
                raise InvalidManifest(f"the manifest has {name!r} as a file name")
            if type(record.size) is not int or record.size < 0 or len(record.chunks) != -(-record.size // self.chunk):
                raise InvalidManifest(
                    f"the manifest has {len(record.chunks)} digests for {record.size} bytes of {name}"
                )
        for name, tensor in self.tensors.items():
            validate_tensor(name, tensor, self.files)


def validate_tensor(name: str, tensor: TensorRecord, files: dict[str, FileRecord]) -> None:
    """Raise InvalidManifest unless the regions are in known files and cover the tensor exactly once."""
    if type(tensor.dtype) is not str or tensor.dtype not in TENSOR_BYTES:
        raise InvalidManifest(f"tensor {name}: unknown dtype {tensor.dtype!r}")
    dimensions = len(tensor.shape)
    if dimensions > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in tensor.shape):
        raise InvalidManifest(f"tensor {name}: invalid shape")
    covered = 0
    for region in tensor.regions:
        numbers = (*region.offset, *region.shape, region.start, region.length)
        if (
            len(region.offset) != dimensions
            or len(region.shape) != dimensions
            or not all(type(n) is int and n >= 0 for n in numbers)
        ):
            raise InvalidManifest(f"tensor {name}: invalid region {region.shape} at {region.offset} of {tensor.shape}")
        if any(o + s > t for o, s, t in zip(region.offset, region.shape, tensor.shape, strict=True)):
            raise InvalidManifest(f"tensor {name}: a region exceeds the shape {tensor.shape}")
        if region.length != prod(region.shape) * TENSOR_BYTES[tensor.dtype]:
            raise InvalidManifest(f"tensor {name}: a region {region.shape} of {tensor.dtype} has {region.length} bytes")
        if (
            type(region.file) is not str
            or region.file not in files
            or region.start + region.length > files[region.file].size
        ):
            raise InvalidManifest(f"tensor {name}: a region is outside of file {region.file}")
        covered += prod(region.shape)
    if covered != prod(tensor.shape) or regions_overlap(tensor.regions):
        raise InvalidManifest(
            f"tensor {name}: its regions have {covered} of {prod(tensor.shape)} elements, or some of them twice"
        )


def regions_overlap(regions: tuple[TensorRegion, ...]) -> bool:
    """Whether two regions share an element. A sweep along the dimension with the most shards keeps this fast."""
    if regions and not regions[0].shape:
        return len(regions) > 1
    dim = max(range(len(regions[0].shape)), key=lambda d: len({r.offset[d] for r in regions})) if regions else 0
    active: list[TensorRegion] = []
    for region in sorted((r for r in regions if prod(r.shape)), key=lambda r: r.offset[dim]):
        active = [other for other in active if other.offset[dim] + other.shape[dim] > region.offset[dim]]
        for other in active:
            edges = zip(region.offset, region.shape, other.offset, other.shape, strict=True)
            if all(o < p + q and p < o + s for o, s, p, q in edges):
                return True
        active.append(region)
    return False


def serialize(values: dict[str, Any], digest: str) -> bytes:
    """The only serialization of a manifest."""
    return json.dumps(values | {"digest": digest}, separators=(",", ":")).encode() + b"\n"


def canonical_digest(values: dict[str, Any]) -> str:
    """The SHA-256 of the canonical JSON of the values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
