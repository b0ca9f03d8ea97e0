"""A source over an array of token ids, and token files as memory maps. Torch-free."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.base.io import open_regular_file
from meshwright.core.data.source import ConcatenatedSource, Sample, Source, content_digest, masked_tokens
from meshwright.errors import DataError

MAX_FULL_SCAN_BYTES = 256 << 20
"""Files up to this size are fingerprinted and validated completely; of larger files, the size and 64 blocks."""

SEPARATOR_BYTE = 0
"""The byte that ends every document of a byte-level corpus."""


class FileStatus(NamedTuple):
    """What the file system says about a file; every change of the file changes it."""

    device: int
    inode: int
    size: int
    modified: int
    """nanoseconds"""
    status_changed: int
    """nanoseconds"""

    @classmethod
    def read(cls, file: Path) -> FileStatus | None:
        """The status of a file, or None if it is gone."""
        try:
            status = file.stat()
        except OSError:
            return None
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class TokenSource:
    """One array of token ids, split into samples of `sequence` tokens. The label of a token is the next token.

    `file` is the file that `ids` is mapped from, if it is; `notes` are what the user should know about the source.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        sequence: int,
        vocab: int,
        name: str,
        file: Path | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.ids, self.sequence, self.vocab, self.name = ids, sequence, vocab, name
        self.file, self.notes = file, tuple(notes)
        self.status = FileStatus.read(file) if file is not None else None
        if len(ids) <= sequence:
            raise DataError(
                f"source {name} is empty: it has {len(ids)} token(s), and one sample needs {sequence + 1}",
                "try more data or a shorter data.sequence",
            )
        for block in scan_blocks(ids):
            if int(block.max()) >= vocab:
                raise DataError(
                    f"source {name} contains token id {int(block.max())}, but model.vocab = {vocab}",
                    "try a larger model.vocab, or data of the matching tokenizer",
                )

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.sequence

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.sequence
        tokens = self.ids[start : start + self.sequence + 1].astype(np.int64)
        if int(tokens.max()) >= self.vocab:
            raise ValueError(f"token id {int(tokens.max())} is out of range for model.vocab = {self.vocab}")
        return tokens[:-1], tokens[1:]

    @cached_property
    def content(self) -> str:
        """A digest of the token ids when it was first read: the content of a mapped file may change."""
        return self.digest(self.ids)

    def digest(self, ids: NDArray[Any]) -> str:
        return content_digest("tokens", ids.dtype, len(ids), self.sequence, *(b.tobytes() for b in scan_blocks(ids)))

    def fingerprint(self) -> str:
        return self.content

    def raise_if_changed(self) -> None:
        """Raises DataError if the file has other content than at the start. A file is read only if its inode, size or
        times differ; a deleted file keeps its content for this run.
        """
        if self.file is None or self.status is None:
            return
        status = FileStatus.read(self.file)
        if status is None or status == self.status:
            return
        now = map_file(self.file, self.ids.dtype)[: len(self.ids)] if status.size == self.status.size else self.ids[:0]
        if self.digest(now) != self.content:
            raise DataError(
                f"data file {self.file} changed during the run",
                "try to restore its content and to repeat the command: no checkpoint contains the changed data",
            )
        self.status = status

    def masked_sample(self) -> Sample:
        return masked_tokens(self.sequence)


def find_files(path: str, name: str = "data.path =") -> list[Path]:
    """The file, the files of the folder, or the matches of the glob, sorted by name. `name` is that of the setting."""
    root = Path(path)
    if root.exists() and not root.is_file() and not root.is_dir():
        raise DataError(f"{name} {path!r} is not a regular file", "expected a file, a folder or a glob")
    files = (
        [root]
        if root.is_file()
        else sorted(p for p in root.iterdir() if p.is_file())
        if root.is_dir()
        else sorted(p for p in map(Path, glob.glob(path)) if p.is_file())
    )
    if not files:
        raise DataError(f"{name} {path!r} matches no file", "expected a file, a folder or a glob")
    return files


def map_file(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A data file, which may be a symbolic link, as a read-only memory map."""
    try:
        size = file.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"token file {file} has {size} bytes, which is not a multiple of {dtype.itemsize} ({dtype.name})",
                "try the other data.dtype, and check whether the file was truncated",
            )
        if size == 0:
            raise DataError(f"source {file} is empty: 0 bytes", "expected a file with data")
        with open_regular_file(file, follow=True) as opened:
            return np.memmap(opened, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"source {file} cannot be read: {error.strerror}", "try another data.path") from None


class DataFiles(Protocol):
    """A source that reads files."""

    notes: tuple[str, ...]

    def raise_if_changed(self) -> None: ...


def file_sources(sources: Iterable[Source]) -> Iterator[DataFiles]:
    """Every source in a list that reads files, also the parts of concatenated ones."""
    for source in sources:
        if hasattr(source, "raise_if_changed"):
            yield cast(DataFiles, source)
        elif isinstance(source, ConcatenatedSource):
            yield from file_sources(source.sources)


def raise_if_changed(sources: Iterable[Source]) -> None:
    """Raises DataError if a data file has changed since its source was opened. Costs one stat per file."""
    for source in file_sources(sources):
        source.raise_if_changed()


def source_notes(sources: Iterable[Source]) -> list[str]:
    """What the user should know about the sources."""
    return [note for source in file_sources(sources) for note in source.notes]


def scan_blocks(ids: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The complete array in blocks if it is small enough, else 64 evenly spaced blocks with both ends included."""
    block = 1 << 20
    if ids.nbytes <= MAX_FULL_SCAN_BYTES:
        starts = np.arange(0, len(ids), block)
    else:
        block //= 16
        starts = np.linspace(0, len(ids) - block, 64).astype(np.int64)
    for start in starts:
        yield ids[start : start + block]
