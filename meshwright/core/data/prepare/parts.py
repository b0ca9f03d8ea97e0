"""The files of encoded parts: what survives when `data prepare` is killed. Torch-free.

A part is reused if its key, which covers its content, the settings and the code, and the digest of the file are as
expected.
"""

from __future__ import annotations

import json
import os
import re
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.io import open_regular_file
from meshwright.core.data.prepare.documents import EncodedPart
from meshwright.core.data.prepare.readers import Part
from meshwright.core.data.shards import ENDS, MASK
from meshwright.core.data.tokenization import tokenizing_code
from meshwright.errors import DataError

TRAILER = struct.Struct("<8sQ16s")  # magic, bytes of the record, xxh3_128 of everything before the trailer
MAGIC = b"MESHPRT1"
FILE_NAME = re.compile(r"[0-9]{8}\..+")
"""Names of parts, and of the temporary files that become parts."""


def stored_key(key: str) -> str:
    """The key of a part for the code of this process; a whole output keeps its inputs when the code changes."""
    return f"{key} {tokenizing_code()}"


def open_new(path: Path) -> BinaryIO:
    """Opens a new file for writing. A file or a symbolic link that has its name is removed, so no link is followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


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
    """[line or row, reason, what to do about the chat template] of what could not be decoded"""


@dataclass(frozen=True)
class PartFolder:
    """The folder of the encoded parts of one output."""

    root: Path
    dtype: np.dtype[Any]

    def require_folder(self) -> None:
        """Raises DataError for a symbolic link, which could lead to any folder of the user, and for a file."""
        if self.root.is_symlink() or (self.root.exists() and not self.root.is_dir()):
            raise DataError(f"{self.root} is a symbolic link or not a folder", "try to remove it, or another folder")

    def path(self, number: int) -> Path:
        return self.root / f"{number:08d}.part"

    def write(self, part: Part, encoded: EncodedPart, keep: bool) -> PartRecord:
        """Writes a part under a temporary name, and renames it. The digest says after a crash whether it is whole.

        Without `keep` nothing is written: the part has too many lines that cannot be decoded.
        """
        ids = encoded.ids
        record = PartRecord(
            key=stored_key(part.key),
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
            with open_new(temporary) as file:
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
            with open_regular_file(self.path(number)) as file:
                content = file.read()
            magic, size, digest = TRAILER.unpack(content[-TRAILER.size :])
            body = memoryview(content)[: -TRAILER.size]
            if magic != MAGIC or xxhash.xxh3_128_digest(body) != digest:
                return None
            record = PartRecord(**json.loads(bytes(body[len(body) - size :])))
        except (OSError, struct.error, ValueError, TypeError):
            return None
        return record if record.key == stored_key(key) else None

    def read(self, number: int, record: PartRecord) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """(token ids, document ends, mask) of a part."""
        with open_regular_file(self.path(number)) as file:
            ids = np.fromfile(file, self.dtype, record.tokens)
            ends = np.fromfile(file, ENDS, record.documents)
            mask = np.fromfile(file, MASK, record.tokens) if record.masked else None
        if len(ids) != record.tokens or len(ends) != record.documents:
            raise DataError(f"{self.path(number)} was changed", "try the same command again")
        return ids, ends, mask

    def remove(self) -> None:
        """Removes the parts, and the folder unless it has other files or folders."""
        self.require_folder()
        if self.root.exists():
            for file in self.root.iterdir():
                if FILE_NAME.fullmatch(file.name) and (file.is_symlink() or not file.is_dir()):
                    file.unlink()
            with suppress(OSError):  # what is not a part stays
                self.root.rmdir()
