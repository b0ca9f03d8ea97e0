"""The files of encoded parts: what survives when `data prepare` is killed. Torch-free.

A part is reused if its key, which covers its content and the settings, and the digest of the file are as expected.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.data.prepare.documents import EncodedPart
from meshwright.data.prepare.readers import Part
from meshwright.data.shards import ENDS, MASK
from meshwright.errors import DataError

TRAILER = struct.Struct("<8sQ16s")  # magic, bytes of the record, xxh3_128 of everything before the trailer
MAGIC = b"MESHPRT1"


@dataclass(frozen=True)
class PartRecord:
    """What is known of an encoded part."""

    key: str
    file: str
    row_name: str
    tokens: int
    documents: int
    masked: bool
    largest_id: int
    ends_document: bool
    """whether a document of lines ends with this part"""
    bad: list[list[Any]]
    """[line or row, reason] of what could not be decoded"""


@dataclass(frozen=True)
class PartFolder:
    """The folder of the encoded parts of one output."""

    root: Path
    dtype: np.dtype[Any]

    def path(self, number: int) -> Path:
        return self.root / f"{number:08d}.part"

    def write(self, part: Part, encoded: EncodedPart, keep: bool) -> PartRecord:
        """Writes a part under a temporary name, and renames it. The digest says after a crash whether it is whole.

        Without `keep` nothing is written: the part has too many lines that cannot be decoded.
        """
        ids = encoded.ids
        record = PartRecord(
            key=part.key,
            file=str(part.file.path),
            row_name=part.file.row_name,
            tokens=encoded.tokens,
            documents=len(encoded.ends),
            masked=bool(encoded.masks),
            largest_id=int(ids.max()) if len(ids) else 0,
            ends_document=part.final and part.file.format == "text",
            bad=[list(row) for row in encoded.bad],
        )
        if not keep:
            return record
        meta = json.dumps(asdict(record)).encode()
        content = [ids.astype(self.dtype), np.array(encoded.ends, ENDS), *encoded.masks, np.frombuffer(meta, np.uint8)]
        digest = xxhash.xxh3_128()
        temporary = self.root / f"{part.number:08d}.{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                for block in content:
                    digest.update(block.data)
                    file.write(block.data)
                file.write(TRAILER.pack(MAGIC, len(meta), digest.digest()))
            os.replace(temporary, self.path(part.number))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return record

    def find(self, number: int, key: str) -> PartRecord | None:
        """The record of an intact part with this key, or None."""
        try:
            content = self.path(number).read_bytes()
            magic, size, digest = TRAILER.unpack(content[-TRAILER.size :])
            body = memoryview(content)[: -TRAILER.size]
            if magic != MAGIC or xxhash.xxh3_128_digest(body) != digest:
                return None
            record = PartRecord(**json.loads(bytes(body[len(body) - size :])))
        except (OSError, struct.error, ValueError, TypeError):
            return None
        return record if record.key == key else None

    def read(self, number: int, record: PartRecord) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """(token ids, document ends, mask) of a part."""
        with open(self.path(number), "rb") as file:
            ids = np.fromfile(file, self.dtype, record.tokens)
            ends = np.fromfile(file, ENDS, record.documents)
            mask = np.fromfile(file, MASK, record.tokens) if record.masked else None
        if len(ids) != record.tokens or len(ends) != record.documents:
            raise DataError(f"{self.path(number)} was changed", "try the same command again")
        return ids, ends, mask

    def remove(self) -> None:
        """Removes the folder and its files, whatever an earlier command has left in it."""
        if self.root.is_dir():
            for file in self.root.iterdir():
                file.unlink()
            self.root.rmdir()
