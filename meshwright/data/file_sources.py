"""Sources that read files: token files, byte-level text, tokenized text and JSONL, and the Python library's own
source.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import DataConfig, SourceConfig
from meshwright.data.source import ConcatenatedSource, Sample, Source, SyntheticSource, content_digest, masked_tokens
from meshwright.errors import DataError

MAX_FULL_SCAN_BYTES = 256 << 20
"""Files up to this size are fingerprinted and checked whole; larger ones by their size and 64 blocks spread over
them.
"""

MAX_LINE_BYTES = 64 << 20
"""A JSONL line beyond this is refused: it would be held in memory at once."""

SEPARATOR_BYTE = 0
"""The byte between two documents of a byte-level corpus."""


class TokenSource:
    """A line of token ids cut into samples of `sequence` tokens; the label of each token is the one after it."""

    def __init__(self, ids: NDArray[Any], sequence: int, vocab: int, name: str) -> None:
        self.ids, self.sequence, self.vocab, self.name = ids, sequence, vocab, name
        if len(ids) <= sequence:
            raise DataError(
                f"source {name} is empty: {len(ids)} token(s), one sample needs {sequence + 1}",
                "give more data or a shorter data.sequence",
            )
        for block in scan_blocks(ids):
            if int(block.max()) >= vocab:
                raise DataError(
                    f"source {name} holds token id {int(block.max())}, beyond model.vocab = {vocab}",
                    "raise model.vocab or use the matching tokens",
                )

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.sequence

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.sequence
        cut = self.ids[start : start + self.sequence + 1].astype(np.int64)
        if int(cut.max()) >= self.vocab:
            raise ValueError(f"token id {int(cut.max())} is beyond model.vocab = {self.vocab}")
        return cut[:-1], cut[1:]

    def fingerprint(self) -> str:
        return content_digest(
            "tokens",
            self.ids.dtype,
            len(self.ids),
            self.sequence,
            *(block.tobytes() for block in scan_blocks(self.ids)),
        )

    def masked_sample(self) -> Sample:
        return masked_tokens(self.sequence)


def open_sources(config: DataConfig, vocab: int) -> list[Source]:
    """The source of a single-source config, or each of a mixture's."""
    return [open_source(source, config, vocab) for source in config.mixture or (config,)]


def open_source(source: SourceConfig, data: DataConfig, vocab: int) -> Source:
    sequence = data.sequence
    if source.kind == "stdlib":
        return TokenSource(standard_library(), sequence, vocab, "stdlib")
    if source.kind == "synthetic":
        return SyntheticSource(source.samples, sequence, vocab)
    files = find_files(source.path)
    if source.kind == "tokens":
        opened: list[Source] = [
            TokenSource(
                map_file(file, np.dtype(f"<{source.dtype[0]}{np.dtype(source.dtype).itemsize}")),
                sequence,
                vocab,
                str(file),
            )
            for file in files
        ]
        return opened[0] if len(opened) == 1 else ConcatenatedSource(opened)
    if source.kind == "text" and not source.tokenizer:
        opened = [TokenSource(map_file(file, np.dtype("u1")), sequence, vocab, str(file)) for file in files]
        return opened[0] if len(opened) == 1 else ConcatenatedSource(opened)
    skips = data.bad_sample_budget if data.on_bad_sample == "quarantine" else 0
    return TokenSource(tokenize_files(source, files, skips), sequence, vocab, source.path)


def find_files(path: str) -> list[Path]:
    """A file, the files of a folder, or the matches of a glob, in the order of their names."""
    place = Path(path)
    found = (
        [place]
        if place.is_file()
        else sorted(p for p in place.iterdir() if p.is_file())
        if place.is_dir()
        else sorted(p for p in map(Path, glob.glob(path)) if p.is_file())
    )
    if not found:
        raise DataError(f"data.path = {path!r} matches no file", "give a file, a folder or a glob")
    return found


def map_file(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        size = file.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"token file {file} has an odd length: {size} bytes is no multiple of {dtype.itemsize} ({dtype.name})",
                "check data.dtype, or whether the file was cut short",
            )
        if size == 0:
            raise DataError(f"source {file} is empty: 0 bytes", "give a file with data")
        return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"source {file} cannot be read: {error.strerror}", "check data.path") from None


def scan_blocks(ids: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The whole array in blocks if it is small enough, else 64 blocks spread evenly, both ends included."""
    block = 1 << 20
    if ids.nbytes <= MAX_FULL_SCAN_BYTES:
        starts = np.arange(0, len(ids), block)
    else:
        block //= 16
        starts = np.linspace(0, len(ids) - block, 64).astype(np.int64)
    for start in starts:
        yield ids[start : start + block]


def standard_library() -> NDArray[np.uint8]:
    """The source text of this Python's own library, file after file in the order of their names, as bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
    pieces: list[bytes] = []
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in outside and not name.startswith("config-"))
        pieces.extend(
            Path(folder, name).read_bytes() + bytes([SEPARATOR_BYTE])
            for name in sorted(files)
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
    if not pieces:
        raise DataError(f"no Python source was found under {root}", 'use data.kind = "text" with a file of your own')
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def tokenize_files(source: SourceConfig, files: list[Path], skips: int) -> NDArray[Any]:
    """The ids of text or JSONL files, made once and kept in the cache under the digest of content and tokenizer."""
    encode, tokenizer_digest = open_tokenizer(source.tokenizer)
    contents = [
        content_digest(file.stat().st_size, *(block.tobytes() for block in scan_blocks(map_file(file, np.dtype("u1")))))
        for file in files
    ]
    key = content_digest(
        source.kind, source.field if source.kind == "jsonl" else "", tokenizer_digest, skips, *contents
    )
    cache = Path(os.environ.get("MESHWRIGHT_CACHE") or Path.home() / ".cache" / "meshwright")
    kept = cache / f"{key}.u32"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Written under a name of its own and renamed whole: two ranks may do this at once, and a crash leaves nothing.
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".part", delete=False) as part:
            try:
                for document in read_documents(source, files, skips):
                    part.write(np.asarray(encode(document), dtype="<u4").tobytes())
                part.close()
                os.replace(part.name, kept)
            except BaseException:
                os.unlink(part.name)
                raise
    if not kept.stat().st_size:
        raise DataError(f"source {source.path} is empty: no line could be decoded", "check data.path and data.field")
    return map_file(kept, np.dtype("<u4"))


def read_documents(source: SourceConfig, files: list[Path], skips: int) -> Iterator[str]:
    """Each document's text. A line that cannot be decoded is named; up to `skips` of them are left out, as a property
    of the file alone.
    """
    for file in files:
        with open(file, "rb") as lines:
            for number in range(1, 1 << 62):
                line = lines.readline(MAX_LINE_BYTES + 1)
                if not line:
                    break
                if source.kind == "jsonl" and not line.strip():
                    continue
                try:
                    if len(line) > MAX_LINE_BYTES:
                        raise ValueError(f"over {MAX_LINE_BYTES:,} bytes")
                    yield line.decode() if source.kind == "text" else jsonl_text(line, source.field)
                except (ValueError, RecursionError) as error:
                    skips -= 1
                    if skips < 0:
                        raise DataError(
                            f"source {file} line {number} cannot be decoded: {error}",
                            'mend the line, or set data.on_bad_sample = "quarantine" and a budget',
                        ) from None


def jsonl_text(line: bytes, field: str) -> str:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise ValueError(f"no text under {field!r}")
    text = str(record[field])
    text.encode()  # half a surrogate pair is no text: a ValueError here, where the line is known
    return text


def open_tokenizer(path: str) -> tuple[Any, str]:
    """(text -> ids, digest) of a tokenizer.json, or the byte level with its separator."""
    if not path:
        return (lambda text: [*text.encode(), SEPARATOR_BYTE]), "bytes"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            f"data.tokenizer = {path!r} needs the tokenizers package", "pip install 'meshwright[text]'"
        ) from None
    try:
        raw = Path(path).read_bytes()
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # noqa: BLE001  the library raises bare Exceptions
        raise DataError(f"tokenizer {path} cannot be read: {error}", "give a tokenizer.json") from None
    return (lambda text: tokenizer.encode(text).ids), content_digest(raw)
