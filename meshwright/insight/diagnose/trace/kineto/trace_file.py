"""Reads the bytes of an untrusted trace file, gzip-compressed or not, in chunks of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from meshwright.base.io import format_bytes, gzip_text_limit, open_regular_file
from meshwright.errors import ConfigError

CHUNK = 1 << 17
"""Bytes of text that are scanned at a time: they stay in the cache of a core."""
MAX_TEXT = 8 << 30
"""Bytes of text that are read of one trace; a compressed file of a few megabytes may contain terabytes."""
GZIP_MAGIC = b"\x1f\x8b"


class TraceFile:
    """The text of a trace in chunks. `notes` says why reading ended before the end, if it did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def chunks(self) -> Iterator[bytes]:
        """Yields the text in chunks of at most CHUNK bytes; raises ConfigError if the file cannot be read."""
        try:
            with open_regular_file(self.path, follow=True) as file:
                yield from self.limited(file)
        except OSError as error:
            raise ConfigError(
                f"trace {self.path} cannot be read: {error.strerror}", "expected a trace that torch.profiler exported"
            ) from None

    def limited(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the text of an open file up to MAX_TEXT bytes, or fewer of a small compressed one."""
        start = file.peek(2)[:2] if hasattr(file, "peek") else b""
        total, is_compressed = 0, start == GZIP_MAGIC
        limit = min(MAX_TEXT, gzip_text_limit(file)) if is_compressed else MAX_TEXT
        for chunk in self.decompressed(file) if is_compressed else iter(lambda: file.read(CHUNK), b""):
            total += len(chunk)
            if total > limit:
                self.notes.append(f"the trace has more than {format_bytes(limit)} of text; the rest is not read")
                return
            yield chunk

    def decompressed(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the decompressed text of a gzip file with one or several members."""
        member = zlib.decompressobj(wbits=31)
        try:
            while compressed := file.read(CHUNK):
                while compressed:
                    yield member.decompress(compressed, CHUNK)
                    compressed = member.unconsumed_tail
                    if member.eof:
                        compressed = member.unused_data.lstrip(b"\0")  # a file may be padded
                        member = zlib.decompressobj(wbits=31)
            yield member.flush()
        except zlib.error:
            self.notes.append("the compressed data is damaged; what precedes the damage is used")
