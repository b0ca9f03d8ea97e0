"""Tokenizes text and JSONL files once, ends every document with a token, and caches the ids. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import SourceConfig
from meshwright.data.source import content_digest
from meshwright.data.token_cache import cache_folder, open_token_cache, write_token_cache
from meshwright.data.token_files import MAX_FULL_SCAN_BYTES, SEPARATOR_BYTE, map_file, scan_blocks
from meshwright.errors import ConfigError, DataError
from meshwright.io import read_regular_file

MAX_LINE_BYTES = 64 << 20
"""A longer line is rejected, because a line is decoded in memory."""

MAX_TOKENIZER_BYTES = 256 << 20
"""Size limit of a tokenizer.json."""

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")
"""Names by which a tokenizer.json usually declares its end-of-text token, in order of preference."""


@dataclass(frozen=True)
class Encoder:
    """Text -> token ids, and the token that ends a document."""

    encode: Callable[[str, bool], list[int]]
    """(text, whether to add the special tokens of the tokenizer's post-processor) -> token ids"""
    end_of_document: int | None
    """The token id that ends every document; None to add none."""
    digest: str
    """A digest of the tokenizer's content."""

    def end(self, ids: list[int]) -> list[int]:
        """The token that is missing at the end of a document: a post-processor may have added it already."""
        if self.end_of_document is None or ids[-1:] == [self.end_of_document]:
            return []
        return [self.end_of_document]


def tokenize_files(
    source: SourceConfig, files: list[Path], skip_budget: int, separator: int | None
) -> tuple[NDArray[np.uint32], Path, list[str]]:
    """The token ids of text or JSONL files, the cache file that they are mapped from, and notes for the user.

    The cache key is a digest of the content, the tokenizer and the settings that change the ids. A cache file that is
    damaged is written again.
    """
    encoder = open_encoder(source, separator)
    field = source.field if source.kind == "jsonl" else ""
    contents = map(file_digest, files)
    key = content_digest(source.kind, field, encoder.digest, encoder.end_of_document, skip_budget, *contents)
    cached = cache_folder() / f"{key}.tokens"
    notes = []
    try:
        ids = open_token_cache(cached) if cached.exists() else None
    except DataError as damage:
        ids, notes = None, [f"{damage.message}; it was written again"]
    if ids is None:
        write_token_cache(cached, encode_documents(source, files, skip_budget, encoder))
        ids = open_token_cache(cached)
    if not len(ids):
        raise DataError(
            f"source {source.path} is empty: no line could be decoded", "try another data.path or data.field"
        )
    return ids, cached, notes


def file_digest(file: Path) -> str:
    """A digest of a file's content. A file that is too large to be read completely also counts as changed if its
    modification time differs.
    """
    content = map_file(file, np.dtype("u1"))
    modified = file.stat().st_mtime_ns if content.nbytes > MAX_FULL_SCAN_BYTES else 0
    return content_digest(content.nbytes, modified, *(block.tobytes() for block in scan_blocks(content)))


def encode_documents(
    source: SourceConfig, files: list[Path], skip_budget: int, encoder: Encoder
) -> Iterator[list[int]]:
    """The token ids of every document. A document is one JSONL record, or one text file, which is encoded by lines."""
    for file in files:
        last_line: list[int] = []
        for number, line in read_lines(file):
            if source.kind == "jsonl" and not line.strip():
                continue
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
                text = line.decode() if source.kind == "text" else jsonl_text(line, source.field)
            except (ValueError, RecursionError) as error:
                skip_budget -= 1
                if skip_budget < 0:
                    raise DataError(
                        f"source {file} line {number} cannot be decoded: {error}",
                        'try to correct the line, or set data.on_bad_sample = "quarantine" and a budget',
                    ) from None
                continue
            ids = encoder.encode(text, source.kind == "jsonl")
            if source.kind == "jsonl":
                ids += encoder.end(ids)
            yield ids
            last_line = ids or last_line
        if source.kind == "text" and last_line:
            yield encoder.end(last_line)


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number, content) of every line, counted from 1. A line over MAX_LINE_BYTES is cut just above the limit."""
    with open(file, "rb") as lines:
        for number in range(1, 1 << 62):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            yield number, line


def jsonl_text(line: bytes, field: str) -> str:
    """The text of a JSONL record."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise ValueError(f"the record has no text under {field!r}")
    text = str(record[field])
    text.encode()  # an unpaired surrogate raises ValueError here, where the line number is known
    return text


def open_encoder(source: SourceConfig, separator: int | None) -> Encoder:
    """The byte-level encoder, or the one of a tokenizer.json."""
    if not source.tokenizer:
        end = None if source.end_of_document == "none" else SEPARATOR_BYTE
        return Encoder(lambda text, _: [*text.encode()], end, "bytes")
    tokenizer, digest = load_tokenizer(source.tokenizer)
    return Encoder(
        lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).ids),
        find_end_of_document(source, tokenizer, separator),
        digest,
    )


def load_tokenizer(path: str) -> tuple[Any, str]:
    """The tokenizer of a tokenizer.json, and the digest of its content."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            f"data.tokenizer = {path!r} needs the tokenizers package", "try pip install 'meshwright[text]'"
        ) from None
    try:
        raw = read_regular_file(Path(path), MAX_TOKENIZER_BYTES, "it", "a tokenizer.json file")
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # noqa: BLE001  the library raises bare Exceptions
        reason = error.message if isinstance(error, ConfigError) else error
        raise DataError(f"tokenizer {path} cannot be read: {reason}", "expected a tokenizer.json file") from None
    return tokenizer, content_digest(raw)


def find_end_of_document(source: SourceConfig, tokenizer: Any, separator: int | None) -> int | None:
    """The token id that ends a document: `data.end_of_document` if it names a token, else `model.separator`, else the
    tokenizer's end-of-text token.
    """
    if source.end_of_document == "none":
        return None
    if source.end_of_document != "auto":
        named: int | None = tokenizer.token_to_id(source.end_of_document)
        if named is None:
            raise DataError(
                f"data.end_of_document = {source.end_of_document!r} is not a token of {source.tokenizer}",
                'expected a token of the tokenizer, "auto" or "none"',
            )
        return named
    if separator is not None:
        return separator
    for name in END_OF_TEXT_TOKENS:
        if (found := tokenizer.token_to_id(name)) is not None:
            return int(found)
    raise DataError(
        f"tokenizer {source.tokenizer} has no known end-of-text token, so documents would run into each other",
        'try data.end_of_document = "TOKEN" (a token of the tokenizer) or "none"',
    )
