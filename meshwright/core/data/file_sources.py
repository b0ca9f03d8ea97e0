"""Opens the sources that a config names: token files, byte-level or tokenized text, JSONL, and the standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import DataConfig, SourceConfig
from meshwright.core.data.chat.packing import PackedChats, SourceWithDocuments
from meshwright.core.data.prepare.cached_tokens import prepare_cached, tokenize_files
from meshwright.core.data.shard_source import ShardSource
from meshwright.core.data.shards import TokenShards
from meshwright.core.data.source import ConcatenatedSource, Source, SyntheticSource, is_packed
from meshwright.core.data.token_files import SEPARATOR_BYTE, TokenSource, find_files, map_file
from meshwright.errors import DataError


def open_sources(config: DataConfig, vocab: int, separator: int | None) -> list[Source]:
    """The sources of a mixture, or the one source of a config without a mixture.

    `vocab` and `separator` are those of the model.
    """
    opened = [open_source(source, config, vocab, separator) for source in config.sources]
    if not any(is_packed(source) for source in opened):
        return opened
    return [source if is_packed(source) else SourceWithDocuments(source, separator) for source in opened]


def open_source(source: SourceConfig, data: DataConfig, vocab: int, separator: int | None) -> Source:
    sequence = data.sequence
    if source.kind == "stdlib":
        return TokenSource(read_standard_library(), sequence, vocab, "stdlib")
    if source.kind == "synthetic":
        return SyntheticSource(source.samples, sequence, vocab)
    if source.kind == "shards":
        shards = TokenShards(source.path, data.shard_cache)
        masked = shards.index.masked
        return PackedChats(shards, sequence, vocab, source.packing) if masked else ShardSource(shards, sequence, vocab)
    files = find_files(source.path)
    skip_budget = data.bad_sample_budget if data.on_bad_sample == "quarantine" else 0
    if source.kind == "chat":
        folder, notes = prepare_cached(source, files, skip_budget, separator, vocab=vocab)
        chats = PackedChats(TokenShards(folder), sequence, vocab, source.packing, source.path)
        chats.notes += tuple(notes)
        return chats
    if source.kind == "tokens":
        dtype = np.dtype(f"<{source.dtype[0]}{np.dtype(source.dtype).itemsize}")
    elif source.kind == "text" and not source.tokenizer:
        dtype = np.dtype("u1")
    else:
        ids, cached, notes = tokenize_files(source, files, skip_budget, separator, vocab=vocab)
        return TokenSource(ids, sequence, vocab, source.path, cached, notes)
    opened: list[Source] = [TokenSource(map_file(file, dtype), sequence, vocab, str(file), file) for file in files]
    return opened[0] if len(opened) == 1 else ConcatenatedSource(opened)


def read_standard_library() -> NDArray[np.uint8]:
    """The source files of the running Python's standard library as bytes, sorted by name, each ended by a zero byte."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
    documents: list[bytes] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in excluded and not name.startswith("config-"))
        documents.extend(
            Path(folder, name).read_bytes() + bytes([SEPARATOR_BYTE])
            for name in sorted(files)
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
    if not documents:
        raise DataError(f"there is no Python source under {root}", 'try data.kind = "text" and a data.path')
    return np.frombuffer(b"".join(documents), dtype=np.uint8)
