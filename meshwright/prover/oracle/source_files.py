"""The samples of a source by their definition in docs/stream.md, read from the raw files alone."""

from __future__ import annotations

import glob
import gzip
import io
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX, DataConfig, RunConfig, SourceConfig

MAX_TOKENIZED_BYTES = 1 << 20
"""Of larger text and JSONL files, only the documents up to this size are tokenized."""
MAX_LINE_BYTES = 64 << 20
"""A longer line counts as one that cannot be decoded."""
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")

Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class SyntheticReader:
    """Sample i: `sequence` + 1 integers below `vocab` from numpy's Philox generator with key i."""

    samples: int
    sequence: int
    vocab: int
    borders: tuple[int, ...] = ()

    def tokens(self, index: int) -> NDArray[Any]:
        return np.random.Generator(np.random.Philox(key=index)).integers(self.vocab, size=self.sequence + 1)


@dataclass(frozen=True)
class FileReader:
    """Sample i of a file: the tokens from i x sequence on; the samples of the next file follow."""

    files: tuple[Path, ...]
    width: int
    """Bytes per token, little-endian."""
    sequence: int

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The first sample of every file, and the end of the last."""
        return (0, *accumulate((f.stat().st_size // self.width - 1) // self.sequence for f in self.files))

    @property
    def samples(self) -> int:
        return self.borders[-1]

    def tokens(self, index: int) -> NDArray[Any]:
        number = max(n for n, first in enumerate(self.borders[:-1]) if first <= index)
        with open(self.files[number], "rb") as file:
            file.seek((index - self.borders[number]) * self.sequence * self.width)
            raw = file.read((self.sequence + 1) * self.width)
        digits = np.frombuffer(raw, np.uint8).reshape(-1, self.width).astype(np.int64)
        return sum((digits[:, place] << (8 * place) for place in range(1, self.width)), start=digits[:, 0])


@dataclass(frozen=True)
class DocumentReader:
    """Sample i of concatenated documents, of which only the first may be known."""

    ids: NDArray[Any]
    sequence: int
    complete: bool
    borders: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """The number of samples, or of those that are known."""
        return (len(self.ids) - 1) // self.sequence

    def tokens(self, index: int) -> NDArray[Any]:
        return self.ids[index * self.sequence : (index + 1) * self.sequence + 1]


@dataclass(frozen=True)
class ShardFolderReader:
    """Sample i of a folder of token shards: the tokens from i x sequence on in all shards together."""

    folder: Path
    width: int
    shard_tokens: int
    total: int
    sequence: int
    borders: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return (self.total - 1) // self.sequence

    def tokens(self, index: int) -> NDArray[Any]:
        raw, position, end = b"", index * self.sequence, (index + 1) * self.sequence + 1
        while position < end:
            shard, offset = divmod(position, self.shard_tokens)
            count = min(end - position, self.shard_tokens - offset)
            with open(self.folder / f"tokens-{shard:05d}.bin", "rb") as file:
                file.seek(offset * self.width)
                raw += file.read(count * self.width)
            position += count
        return np.frombuffer(raw, {2: "<u2", 4: "<u4"}[self.width])


SourceReader = SyntheticReader | FileReader | DocumentReader | ShardFolderReader


def sample_arrays(tokens: NDArray[Any], vocab: int) -> Arrays:
    """(tokens, labels): the label of a token is the next token. A sample with an unknown token is masked."""
    tokens = tokens.astype(np.int64)
    if tokens.max() >= vocab:
        return np.zeros_like(tokens[1:]), np.full_like(tokens[1:], IGNORE_INDEX)
    return tokens[:-1], tokens[1:]


def open_readers(config: RunConfig) -> list[SourceReader]:
    """A reader for each source of a config."""
    return [open_reader(source, config) for source in config.data.mixture or (config.data,)]


def open_reader(source: SourceConfig, config: RunConfig) -> SourceReader:
    data = config.data
    named = source.tokenizer or data.tokenizer
    tokenizer = "" if named == "bytes" else named
    if source.kind == "synthetic":
        return SyntheticReader(source.samples, data.sequence, config.model.vocab)
    if source.kind == "stdlib":
        documents = b"".join(file.read_bytes() + b"\0" for file in standard_library(Path(sysconfig.get_path("stdlib"))))
        return DocumentReader(np.frombuffer(documents, np.uint8), data.sequence, True)
    if source.kind == "shards":
        index = json.loads(Path(source.path, "index.json").read_text())
        width = {"uint16": 2, "uint32": 4}[index["dtype"]]
        return ShardFolderReader(Path(source.path), width, index["shard_tokens"], index["tokens"], data.sequence)
    files = source_files(source.path)
    if source.kind == "tokens":
        return FileReader(files, {"uint16": 2, "uint32": 4}[source.dtype], data.sequence)
    if source.kind == "text" and not tokenizer:
        return FileReader(files, 1, data.sequence)
    ids: list[int] = []
    total = 0
    for size, document in tokenize(source, data, files, tokenizer, config.model.separator):
        ids += document
        total += size
        if total > MAX_TOKENIZED_BYTES and len(ids) > data.sequence:
            return DocumentReader(np.array(ids), data.sequence, False)
    return DocumentReader(np.array(ids), data.sequence, True)


def source_files(path: str) -> tuple[Path, ...]:
    """A file, the files of a folder, or the files that match a pattern, by name."""
    found = [path] if Path(path).is_file() else [*map(str, Path(path).glob("*"))] if Path(path).is_dir() else []
    return tuple(sorted(Path(name) for name in found or glob.glob(path) if Path(name).is_file()))


def standard_library(folder: Path) -> Iterator[Path]:
    """The source files of Python's standard library; the files of a folder precede those of its subfolders."""
    entries = sorted(folder.iterdir())
    yield from (file for file in entries if file.suffix == ".py" and not file.name.startswith("_sysconfigdata"))
    for entry in entries:
        excluded = entry.name in STDLIB_EXCLUDED or entry.name.startswith("config-")
        if entry.is_dir() and not entry.is_symlink() and not excluded:
            yield from standard_library(entry)


def tokenize(
    source: SourceConfig, data: DataConfig, files: tuple[Path, ...], tokenizer: str, separator: int | None
) -> Iterator[tuple[int, list[int]]]:
    """(bytes, token ids) of each JSONL record, or of each line of a text file; its last line ends the document."""
    named = source.end_of_document if source.end_of_document != "auto" else data.end_of_document
    encoder, end = None, None if named == "none" else 0
    if tokenizer:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(tokenizer)
        encoder.no_padding()
        encoder.no_truncation()
        if named == "auto":
            end = separator
            if end is None:
                end = next(n for name in END_OF_TEXT if (n := encoder.token_to_id(name)) is not None)
        elif named != "none":
            end = encoder.token_to_id(named)
    for file in files:
        last = -1
        with open_lines(file) as lines:
            for line in lines:
                text = decode_line(line, source)
                if text is None:
                    continue
                special = source.kind == "jsonl"
                ids = encoder.encode(text, add_special_tokens=special).ids if encoder else list(text.encode())
                if special and end is not None and (not ids or ids[-1] != end):
                    ids = [*ids, end]
                last = ids[-1] if ids else last
                yield len(line), ids
        if source.kind == "text" and end is not None and last not in (-1, end):
            yield 0, [end]


def open_lines(file: Path) -> io.BufferedIOBase:
    """A plain, gzip or zstd file."""
    if file.suffix == ".gz":
        return gzip.open(file)
    if file.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.open(file, "rb"))
    return open(file, "rb")


def decode_line(line: bytes, source: SourceConfig) -> str | None:
    """The text of a line of a text file or of a JSONL record; None for one that cannot be decoded."""
    try:
        if source.kind == "text":
            return line.decode() if len(line) <= MAX_LINE_BYTES else None
        text = json.loads(line)[source.field] if len(line) <= MAX_LINE_BYTES else None
        return text if isinstance(text, str) and text.encode() is not None else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
