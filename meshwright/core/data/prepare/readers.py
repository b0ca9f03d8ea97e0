"""Reads input files as parts: pieces of a few megabytes that depend on the content of a file alone. Torch-free."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from meshwright.base.io import open_regular_file
from meshwright.core.data.prepare.inputs import LINE_FORMATS, InputFile
from meshwright.errors import DataError, describe_exception

PART_BYTES = 1 << 20
"""Content of a part, after decompression; a part is as large as its last line or row makes it."""
MAX_LINE_BYTES = 64 << 20
"""A longer line cannot be decoded: a line is decoded in memory."""
MAX_SKIPPED_BYTES = 1 << 30
"""A line of this size ends the work: a few kilobytes of compressed zeros would be read for hours."""
BATCH_ROWS = 256
"""Rows of a Parquet file that are decoded at once."""
ZSTD_WINDOW = 128 << 20
"""Memory that a zstd file may ask of its reader."""
ZSTD_INPUT = 1 << 10
"""Bytes that are decompressed at once: four of them may become 128 KiB."""
DECODING_ERRORS = (OSError, EOFError, ValueError, zlib.error)


@dataclass(frozen=True)
class Part:
    """Some lines of a text or JSONL file, or rows of an Arrow table as an IPC stream."""

    file: InputFile
    number: int
    """number of the part in the whole input"""
    content: bytes
    first_row: int
    """number of the first line or row in its file, counted from 1"""
    final: bool
    """whether the file ends with this part"""
    consumed: int
    """bytes of the file, as it is on disk, that this part has consumed"""
    key: str = ""
    """digest of the content and of the settings that decide its ids"""


Chunk = tuple[bytes, int, int]
"""(content of a part, number of its lines or rows, position in the file on disk)"""


def read_parts(files: list[InputFile], column: str | None) -> Iterator[Part]:
    """The parts of all files, in order. Of a table only `column` is read, or every column if it is None."""
    number = 0
    for file in files:
        row, before = 1, 0
        try:
            with open_regular_file(file.path, follow=True) as raw:
                chunks = read_lines(file, raw) if file.format in LINE_FORMATS else read_rows(file, raw, column)
                upcoming = next(chunks, None)
                while (chunk := upcoming) is not None:
                    content, rows, position = chunk
                    upcoming = next(chunks, None)
                    yield Part(file, number, content, row, upcoming is None, position - before)
                    number, row, before = number + 1, row + rows, position
        except DECODING_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else describe_exception(error)
            where = f" after {file.row_name} {row - 1:,}" if row > 1 else ""
            raise DataError(
                f"source {file.path} cannot be read{where}: {reason.splitlines()[0]}",
                f"expected a complete {file.compression or file.format} file that this user may read",
            ) from None


def read_lines(file: InputFile, raw: BinaryIO) -> Iterator[Chunk]:
    """Whole lines of at least PART_BYTES, at the end of the file fewer. A line that is too long is cut."""
    row = 1
    with decompressed(file, raw) as stream:
        while content := stream.read(PART_BYTES):
            too_long = len(content) == PART_BYTES and not content.endswith(b"\n")
            if too_long:
                content += stream.readline(MAX_LINE_BYTES + 1)
                too_long = not content.endswith(b"\n") and len(content) - content.rfind(b"\n") > MAX_LINE_BYTES
            rows = content.count(b"\n") + (not content.endswith(b"\n"))
            row += rows
            yield content, rows, raw.tell()
            if too_long:
                skip_line(file, stream, row - 1)


def skip_line(file: InputFile, stream: BinaryIO | io.BufferedReader, row: int) -> None:
    """Reads to the end of a line that is too long to be decoded."""
    skipped = 0
    while (block := stream.readline(PART_BYTES)) and not block.endswith(b"\n"):
        skipped += len(block)
        if skipped > MAX_SKIPPED_BYTES:
            raise DataError(
                f"source {file.path} line {row} is longer than {MAX_SKIPPED_BYTES:,} bytes",
                "expected text with line ends",
            )


@contextmanager
def decompressed(file: InputFile, raw: BinaryIO) -> Iterator[BinaryIO | io.BufferedReader]:
    if file.compression == "gzip":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield io.BufferedReader(stream, 1 << 20)
    elif file.compression == "zstd":
        try:
            import zstandard
        except ImportError:
            raise missing(file, "zstandard") from None
        try:
            frames = ZstdFrames(raw, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW))
            yield io.BufferedReader(frames, 1 << 20)
        except zstandard.ZstdError as error:
            raise ValueError(error) from None
    else:
        yield raw


class ZstdFrames(io.RawIOBase):
    """The content of a zstd file. Unlike the reader of the zstandard library, it reports a truncated file."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self.raw, self.decompressor = raw, decompressor
        self.blocks, self.pending = self.read_blocks(), memoryview(b"")

    def read_blocks(self) -> Iterator[bytes]:
        frame, content = None, b""
        while content := content or self.raw.read(ZSTD_INPUT):
            frame = frame or self.decompressor.decompressobj()
            yield frame.decompress(content)
            content = b""
            if frame.eof:
                content, frame = frame.unused_data, None
        if frame is not None:
            raise EOFError("the last frame is truncated")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.pending:
            block = next(self.blocks, None)
            if block is None:
                return 0
            self.pending = memoryview(block)
        count = min(len(buffer), len(self.pending))
        buffer[:count], self.pending = self.pending[:count], self.pending[count:]
        return count


def read_rows(file: InputFile, raw: BinaryIO, column: str | None) -> Iterator[Chunk]:
    """Arrow IPC streams with rows of at least PART_BYTES, at the end of the file fewer."""
    try:
        import pyarrow
    except ImportError:
        raise missing(file, "pyarrow") from None
    batches: list[Any] = []
    size = 0
    try:
        for batch, position in record_batches(file, raw, column):
            batch.validate(full=True)  # offsets of an untrusted file may lead anywhere
            for start in range(0, batch.num_rows, BATCH_ROWS):
                batches.append(batch.slice(start, BATCH_ROWS))
                size += batches[-1].nbytes
                if size >= PART_BYTES:
                    yield ipc_stream(batches), sum(rows.num_rows for rows in batches), position
                    batches, size = [], 0
        if batches:
            yield ipc_stream(batches), sum(rows.num_rows for rows in batches), position
    except pyarrow.ArrowException as error:
        raise ValueError(describe_exception(error)) from None


def record_batches(file: InputFile, raw: BinaryIO, column: str | None) -> Iterator[tuple[Any, int]]:
    """(record batch, position in the file) of a Parquet file or an Arrow stream."""
    if file.format == "parquet":
        import pyarrow.parquet

        size = raw.seek(0, io.SEEK_END)
        table = pyarrow.parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        columns = None if column is None else [require_column(file, table.schema_arrow.names, column)]
        done = 0
        for batch in table.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            done += batch.num_rows
            yield batch, size * done // max(table.metadata.num_rows, done)
    else:
        import pyarrow.ipc

        with pyarrow.ipc.open_stream(raw) as stream:
            if column is not None:
                require_column(file, stream.schema.names, column)
            for batch in stream:
                yield batch if column is None else batch.select([column]), raw.tell()


def require_column(file: InputFile, names: list[str], column: str) -> str:
    if names.count(column) != 1:
        raise DataError(f"source {file.path} has no column {column!r}", f"expected --field, one of {', '.join(names)}")
    return column


def ipc_stream(batches: list[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def missing(file: InputFile, package: str) -> DataError:
    return DataError(f"{file.path} needs the {package} package", "try pip install 'meshwright[data]'")
