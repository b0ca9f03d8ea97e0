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
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX, DataConfig, RunConfig, SourceConfig
from meshwright.base.store.object_url import is_url
from meshwright.prover.oracle.chat_files import (
    Chat,
    ChatReader,
    Span,
    Tokenize,
    encode_record,
    find_template,
    open_renderer,
    read_masked_shards,
    token_text,
    tokenize_bytes,
    tokenizer_settings,
)

MAX_TOKENIZED_BYTES = 1 << 20
"""Of larger text and JSONL files, only the documents up to this size are tokenized."""
MAX_PACKED_BYTES = 16 << 20
"""Packing depends on every chat: larger files are not read."""
MAX_LINE_BYTES = 64 << 20
"""A longer line counts as one that cannot be decoded."""
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")

Arrays = tuple[NDArray[np.int64], ...]
"""(tokens, labels), and the documents of a packed sample"""


@dataclass(frozen=True)
class UnreadSource:
    """A source that is not read a second time."""

    reason: str
    samples = 0
    complete = False
    borders: tuple[int, ...] = ()


@dataclass(frozen=True)
class SyntheticReader:
    """Sample i: `sequence` + 1 integers below `vocab` from numpy's Philox generator with key i."""

    samples: int
    sequence: int
    vocab: int
    borders: tuple[int, ...] = ()
    complete = True

    def tokens(self, index: int) -> NDArray[Any]:
        return np.random.Generator(np.random.Philox(key=index)).integers(self.vocab, size=self.sequence + 1)


@dataclass(frozen=True)
class FileReader:
    """Sample i of a file: the tokens from i x sequence on; the samples of the next file follow."""

    files: tuple[Path, ...]
    width: int
    """Bytes per token, little-endian."""
    sequence: int
    complete = True

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
    complete = True

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


TokenReader = SyntheticReader | FileReader | DocumentReader | ShardFolderReader
SourceReader = TokenReader | ChatReader | UnreadSource


def read_sample(reader: TokenReader | ChatReader, index: int, config: RunConfig, with_documents: bool) -> Arrays:
    """A sample of a source. Beside packed chats in a mixture, those of other sources have documents, too: a separator
    ends one.
    """
    if isinstance(reader, ChatReader):
        arrays = reader.arrays(index)
    else:
        arrays = sample_arrays(reader.tokens(index), config.model.vocab)
    if not with_documents or len(arrays) > 2:
        return arrays
    ended = (arrays[0][:-1] == config.model.separator) & (arrays[1].max() >= 0)  # a masked sample has one document
    return *arrays, np.append(0, np.cumsum(ended))


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
    if source.kind == "shards" and is_url(source.path):
        return UnreadSource("it is in an object store")
    if source.kind == "shards":
        index = json.loads(Path(source.path, "index.json").read_text())
        width = {"uint16": 2, "uint32": 4}[index["dtype"]]
        if index["masked"]:
            shards = [
                [Path(source.path, f"{kind}-{number:05d}.bin") for kind in ("tokens", "documents", "mask")]
                for number in range(len(index["shards"]))
            ]
            lengths, answers, read = read_masked_shards(shards, index["shard_tokens"], width)
            return ChatReader(lengths, answers, read, data.sequence, source.packing)
        return ShardFolderReader(Path(source.path), width, index["shard_tokens"], index["tokens"], data.sequence)
    files = source_files(source.path)
    if source.kind == "chat":
        return open_chats(source, data, files, tokenizer, config.model.separator)
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
    encoder, end = None, None if end_of_document(source, data) == "none" else 0
    if tokenizer:
        encoder = open_tokenizer(tokenizer)
        end = find_end(encoder, end_of_document(source, data), separator)
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


def end_of_document(source: SourceConfig, data: DataConfig) -> str:
    return source.end_of_document if source.end_of_document != "auto" else data.end_of_document


def open_tokenizer(tokenizer: str) -> Any:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    encoder.no_padding()
    encoder.no_truncation()
    return encoder


def find_end(encoder: Any, named: str, separator: int | None) -> int | None:
    """The token that ends a document."""
    if named == "none":
        return None
    if named != "auto":
        return int(encoder.token_to_id(named))
    if separator is not None:
        return separator
    return next(int(n) for name in END_OF_TEXT if (n := encoder.token_to_id(name)) is not None)


def open_chats(
    source: SourceConfig, data: DataConfig, files: tuple[Path, ...], tokenizer: str, separator: int | None
) -> ChatReader | UnreadSource:
    """The chats of JSONL files. Of large files, only the first are read if a sample is one chat."""
    template, named = source.chat_template or data.chat_template, end_of_document(source, data)
    if data.on_bad_sample == "quarantine" and find_template(template, tokenizer)[0]:
        return UnreadSource("a chat may be skipped because its template takes too long")
    render, encode = open_renderer(template, tokenizer), cast(Tokenize, tokenize_bytes)
    chats, total = list[Chat](), 0
    end = None if named == "none" else 0
    if tokenizer:
        encoder = open_tokenizer(tokenizer)
        if named == "auto" and separator is None:
            named = token_text(tokenizer_settings(tokenizer).get("eos_token")) or "none"
        end = find_end(encoder, named, separator)

        def encode_text(text: str, special: bool) -> tuple[list[int], list[Span]]:
            encoding = encoder.encode(text, add_special_tokens=special)
            return list(encoding.ids), list(encoding.offsets)

        encode = encode_text

    for file in files:
        with open_lines(file) as lines:
            for line in lines:
                total += len(line)
                if total > (MAX_PACKED_BYTES if source.packing else MAX_TOKENIZED_BYTES):
                    if source.packing:
                        return UnreadSource(f"its chats have more than {MAX_PACKED_BYTES:,} bytes")
                    return ChatReader.of(chats, data.sequence, False, complete=False)
                try:
                    chats.append(encode_record(json.loads(line), render, encode, end))
                except (ValueError, LookupError, TypeError, RecursionError):
                    continue
    return ChatReader.of(chats, data.sequence, source.packing, complete=True)


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
