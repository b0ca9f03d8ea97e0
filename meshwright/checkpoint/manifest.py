"""The one file that makes a checkpoint exist: what it is, where every tensor lies, and the digest of every byte.

Torch-free, and careful with strangers: a manifest is bounded, checked field by field, names no file outside its own
folder, and carries a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from meshwright.config.dtypes import TENSOR_BYTES

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
DIGEST_CHUNK_BYTES = 8 << 20
"""Bytes that one digest covers."""


class InvalidManifest(Exception):
    """A manifest that cannot be trusted, and why."""


@dataclass(frozen=True)
class TensorRegion:
    """A block of a tensor: where it sits in the tensor, and where its bytes lie."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorRecord:
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[TensorRegion, ...]


@dataclass(frozen=True)
class FileRecord:
    size: int
    chunks: tuple[str, ...]
    """xxh3-128 of each CHUNK bytes"""


@dataclass(frozen=True)
class Manifest:
    run: str
    timeline: int
    step: int
    """optimizer steps that are done"""
    attempt: int
    """the attempt that wrote it: the fencing epoch"""
    ordinal: int
    """how many checkpoints of this lineage came before"""
    parent: str
    """digest of the checkpoint before, '' for the first"""
    layout: dict[str, int]
    identity: dict[str, Any]
    made_by: dict[str, Any]
    """what may change bits without being identity: versions, device, threads"""
    data: dict[str, Any]
    """the data cursor"""
    rng: dict[str, int]
    """the generator's seed for the next step, by logical owner"""
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    counters: dict[str, Any]
    owners: dict[str, dict[str, Any]]
    """small state that belongs to a logical owner, not to the whole"""
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    format: int = FORMAT
    chunk: int = DIGEST_CHUNK_BYTES
    digest: str = field(default="", compare=False)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """The manifest as a file, with its own digest as the last key."""
        values = asdict(self)
        del values["digest"]
        for tensor in values["tensors"].values():
            tensor["pieces"] = tensor.pop("regions")  # the key of format 1
        return serialize(values, canonical_digest(values))

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises Damaged unless every byte is as it was written and every field is sane."""
        try:
            values = json.loads(raw)
            said = values.pop("digest")
            found, again = canonical_digest(values), serialize(values, said)
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise InvalidManifest("the manifest is torn: it is not whole JSON with a digest") from None
        if found != said:
            raise InvalidManifest(f"the manifest's own digest is {str(said)[:16]}, its content gives {found[:16]}")
        if again != raw:  # 1e-8 for 1e-08: the same values in other bytes
            raise InvalidManifest("the manifest's bytes are not those that were written")
        if type(values.get("format")) is not int or values["format"] != FORMAT:
            raise InvalidManifest(f"the manifest has format {values.get('format')}, this version reads {FORMAT}")
        try:
            files = {name: FileRecord(f["size"], tuple(f["chunks"])) for name, f in values.pop("files").items()}
            tensors = {
                name: TensorRecord(
                    t["dtype"],
                    tuple(t["shape"]),
                    tuple(
                        TensorRegion(tuple(p["offset"]), tuple(p["shape"]), p["file"], p["start"], p["length"])
                        for p in t["pieces"]
                    ),
                )
                for name, t in values.pop("tensors").items()
            }
            manifest = cls(**values, files=files, tensors=tensors, digest=said)
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidManifest(f"the manifest lacks a field or has a strange one: {error}") from None
        manifest.check()
        return manifest

    def check(self) -> None:
        """What must hold of any manifest, whoever wrote it."""
        counts = (self.timeline, self.step, self.attempt, self.ordinal, self.chunk)
        if not all(type(n) is int and n >= 0 for n in counts) or not 1 <= self.chunk <= 1 << 30:
            raise InvalidManifest("the manifest has a number out of range")
        tables = [self.layout, self.identity, self.made_by, self.data, self.rng, self.schedule, self.scaler]
        tables += [self.counters, self.owners]
        if (
            not all(type(table) is dict for table in tables)
            or type(self.run) is not str
            or type(self.parent) is not str
        ):
            raise InvalidManifest("the manifest has a field of another kind")
        if not all(type(n) is int for n in self.rng.values()) or not all(type(o) is dict for o in self.owners.values()):
            raise InvalidManifest("the manifest has a strange generator or owner")
        for name, record in self.files.items():
            if not all(type(chunk) is str for chunk in record.chunks):
                raise InvalidManifest(f"the manifest gives {name} a digest that is none")
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or name == MANIFEST_FILE:
                raise InvalidManifest(f"the manifest names a file {name!r}, which is none of a checkpoint's")
            if type(record.size) is not int or record.size < 0 or len(record.chunks) != -(-record.size // self.chunk):
                raise InvalidManifest(f"the manifest gives {name} {record.size} bytes and {len(record.chunks)} digests")
        for name, tensor in self.tensors.items():
            validate_tensor(name, tensor, self.files)


def validate_tensor(name: str, tensor: TensorRecord, files: dict[str, FileRecord]) -> None:
    """Its pieces lie in known files and fill it exactly."""
    if type(tensor.dtype) is not str or tensor.dtype not in TENSOR_BYTES:
        raise InvalidManifest(f"tensor {name}: no dtype {tensor.dtype!r}")
    rank = len(tensor.shape)
    if rank > 64 or not all(type(n) is int and 0 <= n < 1 << 63 for n in tensor.shape):
        raise InvalidManifest(f"tensor {name}: no tensor has its shape")
    filled = 0
    for piece in tensor.regions:
        numbers = (*piece.offset, *piece.shape, piece.start, piece.length)
        if len(piece.offset) != rank or len(piece.shape) != rank or not all(type(n) is int and n >= 0 for n in numbers):
            raise InvalidManifest(
                f"tensor {name}: a piece of {piece.shape} at {piece.offset} is no block of {tensor.shape}"
            )
        if any(o + s > t for o, s, t in zip(piece.offset, piece.shape, tensor.shape, strict=True)):
            raise InvalidManifest(f"tensor {name}: a piece reaches outside of {tensor.shape}")
        if piece.length != prod(piece.shape) * TENSOR_BYTES[tensor.dtype]:
            raise InvalidManifest(f"tensor {name}: a piece of {piece.shape} {tensor.dtype} has {piece.length} bytes")
        if (
            type(piece.file) is not str
            or piece.file not in files
            or piece.start + piece.length > files[piece.file].size
        ):
            raise InvalidManifest(f"tensor {name}: a piece lies outside of {piece.file}")
        filled += prod(piece.shape)
    if filled != prod(tensor.shape) or regions_overlap(tensor.regions):
        raise InvalidManifest(
            f"tensor {name}: its pieces hold {filled} of {prod(tensor.shape)} elements, or some twice"
        )


def regions_overlap(pieces: tuple[TensorRegion, ...]) -> bool:
    """Whether two blocks share an element: swept along the axis that is cut most, so that shards stay quick."""
    if pieces and not pieces[0].shape:
        return len(pieces) > 1
    axis = max(range(len(pieces[0].shape)), key=lambda axis: len({p.offset[axis] for p in pieces})) if pieces else 0
    reaching: list[TensorRegion] = []
    for piece in sorted((p for p in pieces if prod(p.shape)), key=lambda p: p.offset[axis]):
        reaching = [other for other in reaching if other.offset[axis] + other.shape[axis] > piece.offset[axis]]
        for other in reaching:
            edges = zip(piece.offset, piece.shape, other.offset, other.shape, strict=True)
            if all(o < p + q and p < o + s for o, s, p, q in edges):
                return True
        reaching.append(piece)
    return False


def serialize(values: dict[str, Any], digest: str) -> bytes:
    """The one way to write a manifest down."""
    return json.dumps(values | {"digest": digest}, separators=(",", ":")).encode() + b"\n"


def canonical_digest(values: dict[str, Any]) -> str:
    """SHA-256 of a canonical JSON text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
