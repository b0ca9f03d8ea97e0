"""Joins encoded parts to shards of equal size, and publishes them by their index. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.io import atomic_write, sync_folder
from meshwright.core.data.prepare.parts import PartFolder, PartRecord, open_new
from meshwright.core.data.shards import DTYPES, ENDS, INDEX, MASK, Shard, ShardIndex, shard_file
from meshwright.core.data.source import content_digest
from meshwright.core.data.tokenization import Encoder
from meshwright.errors import ConfigError

MAX_SHARDS = 50_000
"""The index of more shards would be larger than a JSON file that is read."""


class TokenShardWriter:
    """Writes token ids to shards of `shard_tokens` each. Files have their names once they are durable."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int, masked: bool) -> None:
        self.folder, self.dtype, self.shard_tokens, self.masked = folder, dtype, shard_tokens, masked
        self.kinds = ("tokens", "documents", "mask") if masked else ("tokens", "documents")
        self.shards: list[Shard] = []
        self.whole = {kind: xxhash.xxh3_128() for kind in self.kinds}
        self.position = 0
        self.documents = 0
        self.files: dict[str, BinaryIO] = {}
        self.digests: dict[str, Any] = {}
        self.shard_position = 0
        self.shard_documents = 0

    def write(self, ids: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any] | None) -> None:
        """Appends token ids; `ends` are the ends of documents among them, and `mask` has an entry per id."""
        start = 0
        first_end = 0
        while start < len(ids) or first_end < len(ends):
            if self.shard_position == self.shard_tokens:
                self.close_shard()
            stop = min(len(ids), start + self.shard_tokens - self.shard_position)
            last_end = int(np.searchsorted(ends, stop, side="right"))
            inside = ends[first_end:last_end].astype(np.int64) - start
            self._append("tokens", ids[start:stop].astype(self.dtype))
            self._append(
                "documents", (inside + self.shard_position).astype(ENDS), (inside + self.position).astype(ENDS)
            )
            if mask is not None:
                self._append("mask", mask[start:stop].astype(MASK))
            self.position += stop - start
            self.shard_position += stop - start
            self.shard_documents += len(inside)
            start, first_end = stop, last_end

    def _append(self, kind: str, array: NDArray[Any], whole: NDArray[Any] | None = None) -> None:
        """`whole` is what the digest of all shards covers; it must not depend on their size."""
        if not self.files:
            if len(self.shards) == MAX_SHARDS:
                raise ConfigError(f"the data has more than {MAX_SHARDS:,} shards", "try a larger --shard-tokens")
            for name in self.kinds:
                path = self.folder / f".{shard_file(name, len(self.shards))}"
                self.files[name] = open_new(path)
                self.digests[name] = xxhash.xxh3_128()
        content = array.tobytes()
        self.files[kind].write(content)
        self.digests[kind].update(content)
        self.whole[kind].update(content if whole is None else whole.tobytes())

    def close_shard(self) -> None:
        """Makes the files of a shard durable, and gives them their names."""
        for kind, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, self.folder / shard_file(kind, len(self.shards)))
        digests = {kind: digest.hexdigest() for kind, digest in self.digests.items()}
        self.shards.append(Shard(self.shard_position, self.shard_documents, digests))
        self.documents += self.shard_documents
        self.shard_position = self.shard_documents = 0
        self.files, self.digests = {}, {}

    def content_digest(self) -> str:
        """A digest of ids, ends and masks over all shards."""
        digests = [self.whole[kind].hexdigest() for kind in self.kinds]
        return content_digest("shards", self.dtype.name, self.position, self.documents, *digests)


def assemble(
    folder: Path, parts: PartFolder, records: list[PartRecord], encoder: Encoder, shard_tokens: int, inputs: str
) -> ShardIndex:
    """Writes the shards of all parts, and then the index that makes the folder valid."""
    masked = any(record.masked for record in records)
    writer = TokenShardWriter(folder, parts.dtype, shard_tokens, masked)
    document, last = 0, np.empty(0, parts.dtype)  # tokens of the document of lines so far, and the last one
    for number, record in enumerate(records):
        ids, ends, mask = parts.read(number, record)
        document, last = document + len(ids), ids[-1:] if len(ids) else last
        if record.ends_document and document:
            ids = np.concatenate([ids, np.array(encoder.end(last.tolist()), parts.dtype)])
            ends = np.array([len(ids)], ENDS)
        if record.ends_document:
            document = 0
        writer.write(ids, ends, mask)
    writer.close_shard()
    end = encoder.end_of_document
    index = ShardIndex(
        dtype=next(name for name, dtype in DTYPES.items() if dtype == parts.dtype),
        tokens=writer.position,
        documents=writer.documents,
        shard_tokens=shard_tokens,
        largest_id=max([record.largest_id for record in records] + ([] if end is None else [end])),
        masked=masked,
        end_of_document=end,
        tokenizer=encoder.digest,
        skipped=sum(len(record.bad) for record in records),
        inputs=inputs,
        digest=writer.content_digest(),
        shards=tuple(writer.shards),
    )
    sync_folder(folder)
    atomic_write(folder / INDEX, index.to_json())
    return index
