"""The binary format of a rollout log: the header of a segment, and the header of a record. Torch-free.

A segment begins with a header of 64 bytes:

    magic 8, format 4, checksum of these 4, run 16, segment 8, writer 16, checksum of the header 8

A record is a header of 72 bytes and a payload:

    magic 8, run 16, segment 8, offset 8, length of the payload 8, digest of the payload 16, checksum of the header 8

Numbers are little-endian, checksums are xxh3-64 (of the first twelve bytes xxh32), the digest is xxh3-128. The run is
the beginning of the SHA-256 of its id. A record names its run and place, so that one that was copied from elsewhere is
told from one that is damaged; the checksum of the header covers the digest of the payload.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from meshwright.rl.log.interface import LogPosition

FORMAT = 1
SEGMENT_MAGIC = b"MWROLLS\n"
RECORD_MAGIC = b"\xf5MWREC\r\n"  # its first byte is in no UTF-8 text
PREFIX = struct.Struct("<8sII")
"""The beginning of a segment in every format, so that an older release can name a newer format."""
SEGMENT_HEADER = struct.Struct("<8sII16sQ16sQ")
RECORD_HEADER = struct.Struct("<8s16sQQQ16sQ")
MAX_RECORD_BYTES = 1 << 30
"""Limit of a payload. A length from a file is checked against it, and against the size of the file, before memory is
allocated.
"""


class NewerFormat(ValueError):
    """A segment whose format this release does not know."""


class InvalidHeader(ValueError):
    """Bytes that are not the header of a segment or of a record."""


def digest_run_id(run_id: str) -> bytes:
    return hashlib.sha256(run_id.encode()).digest()[:16]


@dataclass(frozen=True)
class SegmentHeader:
    """The header of a segment."""

    run: bytes
    segment: int
    writer: bytes
    """random bytes of the writer that created the segment"""

    def encode(self) -> bytes:
        prefix = struct.pack("<8sI", SEGMENT_MAGIC, FORMAT)
        prefix += struct.pack("<I", xxhash.xxh32_intdigest(prefix))
        body = prefix + struct.pack("<16sQ16s", self.run, self.segment, self.writer)
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, content: bytes) -> SegmentHeader:
        """Raises InvalidHeader with the expected and the found value, or NewerFormat."""
        if len(content) < PREFIX.size or content[:8] != SEGMENT_MAGIC:
            raise InvalidHeader(f"expected a rollout log that begins with {SEGMENT_MAGIC!r}, found {content[:8]!r}")
        _, number, check = PREFIX.unpack_from(content)
        if check == xxhash.xxh32_intdigest(content[:12]) and number > FORMAT:
            raise NewerFormat(f"expected format {FORMAT} or earlier, found format {number}")
        if len(content) < SEGMENT_HEADER.size:
            raise InvalidHeader(f"expected a header of {SEGMENT_HEADER.size} bytes, found {len(content)}")
        _, number, _, run, segment, writer, found = SEGMENT_HEADER.unpack_from(content)
        expected = xxhash.xxh3_64_intdigest(content[: SEGMENT_HEADER.size - 8])
        if found != expected or number != FORMAT:
            raise InvalidHeader(f"the header of the segment has checksum {expected:016x}, recorded is {found:016x}")
        return cls(run, segment, writer)


@dataclass(frozen=True)
class RecordHeader:
    """The header of a record, which says where the record belongs."""

    run: bytes
    position: LogPosition
    length: int
    digest: bytes

    @classmethod
    def of_payload(cls, run: bytes, position: LogPosition, payload: bytes) -> RecordHeader:
        return cls(run, position, len(payload), xxhash.xxh3_128_digest(payload))

    def encode(self) -> bytes:
        fields = (RECORD_MAGIC, self.run, self.position.segment, self.position.offset, self.length, self.digest)
        body = struct.pack("<8s16sQQQ16s", *fields)
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, content: bytes) -> RecordHeader:
        """Raises InvalidHeader with the expected and the found value."""
        if len(content) < RECORD_HEADER.size:
            raise InvalidHeader(f"expected the {RECORD_HEADER.size} bytes of a record's header, found {len(content)}")
        magic, run, segment, offset, length, digest, found = RECORD_HEADER.unpack_from(content)
        if magic != RECORD_MAGIC:
            raise InvalidHeader(f"expected a record that begins with {RECORD_MAGIC!r}, found {magic!r}")
        expected = xxhash.xxh3_64_intdigest(content[: RECORD_HEADER.size - 8])
        if found != expected:
            raise InvalidHeader(f"the header of the record has checksum {expected:016x}, recorded is {found:016x}")
        if length > MAX_RECORD_BYTES:
            raise InvalidHeader(f"expected a record of at most {MAX_RECORD_BYTES:,} bytes, found {length:,}")
        return cls(run, LogPosition(segment, offset), length, digest)

    @property
    def size(self) -> int:
        """Bytes of the record, with its header."""
        return RECORD_HEADER.size + self.length

    def require_place(self, run: bytes, position: LogPosition) -> None:
        """Raises InvalidHeader if the record was copied from another run or another place."""
        if self.run != run:
            raise InvalidHeader(f"a record of another run: expected run {run.hex()}, found {self.run.hex()}")
        if self.position != position:
            raise InvalidHeader(f"a record of another place: expected {position}, found {self.position}")

    def require_payload(self, payload: bytes) -> None:
        """Raises InvalidHeader unless the payload is the one that was appended."""
        found = xxhash.xxh3_128_digest(payload)
        if len(payload) != self.length or found != self.digest:
            raise InvalidHeader(
                f"the payload of the record is damaged: expected {self.length:,} bytes with xxh3-128 "
                f"{self.digest.hex()}, found {len(payload):,} bytes with {found.hex()}"
            )
