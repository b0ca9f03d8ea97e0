"""The token ids of the text and JSONL files of a config, prepared once and kept in the cache. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import SourceConfig
from meshwright.core.data.prepare.inputs import InputFile, compression
from meshwright.core.data.prepare.prepare import MAX_SHARD_TOKENS, Preparation, prepare_shards
from meshwright.core.data.shard_files import cache_folder
from meshwright.core.data.shards import INDEX, TokenShards, shard_file
from meshwright.core.data.source import content_digest
from meshwright.core.data.token_files import MAX_FULL_SCAN_BYTES, map_file, scan_blocks
from meshwright.core.data.tokenization import tokenizing_code
from meshwright.errors import DataError

HINT = 'try to correct the line, or set data.on_bad_sample = "quarantine" and a budget'
EMPTY_HINTS = {
    "text": "try another data.path",
    "jsonl": "try another data.path or data.field",
    "chat": "try another data.path or data.chat_template",
}
"""The kind of a source -> the keys that decide whether it has tokens."""


def tokenize_files(
    source: SourceConfig, files: list[Path], skip_budget: int, separator: int | None, *, vocab: int
) -> tuple[NDArray[Any], Path, list[str]]:
    """The token ids of text or JSONL files, the cache file that they are mapped from, and notes for the user.

    The cache key is a digest of the content, the tokenizer, the settings and the code that decide the ids. A cache file
    that is damaged is written again.
    """
    folder, notes = prepare_cached(source, files, skip_budget, separator, vocab=vocab)
    return TokenShards(folder).map("tokens", 0), folder / shard_file("tokens", 0), notes


def prepare_cached(
    source: SourceConfig, files: list[Path], skip_budget: int, separator: int | None, *, vocab: int
) -> tuple[Path, list[str]]:
    """The folder of the cache with the shards of files, and notes for the user. There is one shard, of uint32: the
    fingerprint of a source covers the type of its ids.
    """
    inputs = [InputFile(file, "text" if source.kind == "text" else "jsonl", compression(file)) for file in files]
    preparation = Preparation.of(inputs, source, separator, "uint32", MAX_SHARD_TOKENS)
    largest = preparation.encoder.unadded_vocab - 1  # whether there are larger ids is known when the files are read
    if source.tokenizer and largest >= vocab:
        raise DataError(
            f"tokenizer {source.tokenizer} has token ids up to {largest}, but model.vocab = {vocab}",
            "try the tokenizer of the model, or a larger model.vocab",
        )
    field = "" if source.kind == "text" else source.field
    encoder = preparation.encoder if preparation.chat is None else preparation.chat
    end = preparation.encoder.end_of_document
    folder = cache_folder() / content_digest(
        tokenizing_code(), source.kind, field, encoder.digest, end, skip_budget, *map(file_digest, files)
    )
    notes = []
    if (folder / INDEX).exists():
        try:
            shards = TokenShards(folder)
            for kind in shards.index.shards[0].digests:
                shards.map(kind, 0)
            return folder, []
        except DataError as damage:
            notes = [f"{damage.message}; it was written again"]
            (folder / INDEX).unlink(missing_ok=True)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    prepare_shards(
        preparation,
        folder,
        workers=workers,
        skip_budget=skip_budget,
        hint=HINT,
        empty_hint=EMPTY_HINTS[source.kind],
        name=f"source {source.path}",
        cached=True,
    )
    return folder, notes


def file_digest(file: Path) -> str:
    """A digest of a file's content. A file that is too large to be read completely also counts as changed if its
    modification time differs.
    """
    content = map_file(file, np.dtype("u1"))
    modified = file.stat().st_mtime_ns if content.nbytes > MAX_FULL_SCAN_BYTES else 0
    return content_digest(content.nbytes, modified, *(block.tobytes() for block in scan_blocks(content)))
