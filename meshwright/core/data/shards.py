"""Token shards: a folder of token ids with the ends of their documents, an index, and digests. Torch-free.

`index.json` makes the folder valid; it is written last. The shards are cuts of one array of token ids at multiples of
`shard_tokens`, so a document may continue in the next shard. Per shard there are `tokens-00000.bin`,
`documents-00000.bin` (the ends of the documents that end in this shard, as uint64 from the start of the shard) and, for
data with a mask, `mask-00000.bin` (one byte per token, 1 where the loss counts).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.io import MAX_JSON_BYTES, parse_json
from meshwright.base.store.interface import Store
from meshwright.base.store.object_store import ObjectStore
from meshwright.base.store.object_url import is_url, parse_url
from meshwright.base.store.posix import PosixStore
from meshwright.core.data.shard_files import FolderFiles, ShardCache, ShardFiles
from meshwright.core.data.source import content_digest
from meshwright.errors import ConfigError, DataError

INDEX = "index.json"
FORMAT = "meshwright-shards-1"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS = np.dtype("<u8")
MASK = np.dtype("u1")
OPEN_FILES = 16
"""Shard files that a process keeps mapped."""
URL_CACHE_BYTES = 64 << 30
"""The size of the cache for shards in an object store, unless data.shard_cache gives another."""
EXPECTED = "a folder that meshwright data prepare has written"


@dataclass(frozen=True)
class Shard:
    """The contents of one shard, as the index records them."""

    tokens: int
    documents: int
    digests: dict[str, str]
    """kind of file (tokens, documents, mask) -> xxh3_128 of its content"""


@dataclass(frozen=True)
class ShardIndex:
    """The contents of a folder of token shards."""

    dtype: str
    tokens: int
    documents: int
    shard_tokens: int
    """tokens of every shard but the last"""
    largest_id: int
    """largest token id in the data"""
    masked: bool
    """whether there are masks"""
    end_of_document: int | None
    """token id that ends every document"""
    tokenizer: str
    """digest of the tokenizer, or "bytes" """
    skipped: int
    """lines or rows that could not be decoded"""
    inputs: str
    """digest of the inputs and of the settings that decide the ids"""
    digest: str
    """digest of ids, document ends and masks, which does not depend on the size of the shards"""
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        counts = [self.tokens, self.documents, self.largest_id, self.skipped]
        counts += [count for shard in self.shards for count in (shard.tokens, shard.documents)]
        if self.dtype not in DTYPES or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"dtype {self.dtype!r} or a count is not valid")
        if type(self.shard_tokens) is not int or self.shard_tokens < 1:
            raise ValueError(f"shard_tokens is {self.shard_tokens!r}")
        full = [self.shard_tokens] * (len(self.shards) - 1)
        if [shard.tokens for shard in self.shards[:-1]] != full or self.shards[-1].tokens > self.shard_tokens:
            raise ValueError(f"not every shard has {self.shard_tokens} tokens")
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError(f"the shards do not have {self.tokens} tokens")
        if sum(shard.documents for shard in self.shards) != self.documents:
            raise ValueError(f"the shards do not have {self.documents} documents")
        kinds = {"tokens", "documents", "mask"} if self.masked else {"tokens", "documents"}
        for shard in self.shards:
            if set(shard.digests) != kinds or not all(map(is_digest, shard.digests.values())):
                raise ValueError("a digest is missing or not valid")
        if len(self.shards) == 1:
            contents = [self.shards[0].digests[kind] for kind in ("tokens", "documents", "mask") if kind in kinds]
            if self.digest != content_digest("shards", self.dtype, self.tokens, self.documents, *contents):
                raise ValueError("its digest is not that of its shard")
        if type(self.digest) is not str or type(self.inputs) is not str or type(self.tokenizer) is not str:
            raise ValueError("a digest is not text")
        if self.end_of_document is not None and type(self.end_of_document) is not int:
            raise ValueError(f"end_of_document is {self.end_of_document!r}")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"


def is_digest(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None


def read_index(store: Store, folder: Path) -> ShardIndex:
    """The validated index of a folder; raises DataError. `folder` is its name in messages."""
    try:
        size = store.size(INDEX)
        if size is None:
            raise DataError(f"{folder} has no {INDEX}", f"expected {EXPECTED}")
        if size > MAX_JSON_BYTES:
            raise DataError(f"{folder}/{INDEX} is larger than {MAX_JSON_BYTES:,} bytes", f"expected {EXPECTED}")
        record = parse_json(store.read(INDEX, 0, MAX_JSON_BYTES), f"{folder}/{INDEX}", EXPECTED)
        if record.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        record["shards"] = tuple(Shard(**shard) for shard in record["shards"])
        return ShardIndex(**record)
    except OSError as error:
        raise DataError(f"{folder}/{INDEX} cannot be read: {error.strerror}", f"expected {EXPECTED}") from None
    except ConfigError as error:
        raise DataError(error.message, error.hint) from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder}/{INDEX} is not a valid index: {error}", f"expected {EXPECTED}") from None


def shard_file(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.bin"


class TokenShards:
    """Random access to the token ids, documents and masks of a folder of shards.

    Without `cache_bytes`, files are mapped from the folder. With it, whole files are fetched into a local cache of that
    size. Files of an object store, whose URL is `folder`, are always fetched into a cache. A file is verified by its
    digest when a process first maps it.
    """

    def __init__(self, folder: Path | str, cache_bytes: int = 0) -> None:
        store: Store
        if is_url(folder):
            store, cache_bytes = ObjectStore(parse_url(folder)), cache_bytes or URL_CACHE_BYTES
        else:
            store = PosixStore(Path(folder))
        self.folder = Path(folder)
        self.index = read_index(store, self.folder)
        self.files: ShardFiles = (
            ShardCache(store, self.folder, cache_bytes) if cache_bytes else FolderFiles(self.folder)
        )
        self.checked: set[int] = set()
        """shards whose ids were compared with the index"""
        self.open: OrderedDict[str, NDArray[Any]] = OrderedDict()

    @property
    def digest(self) -> str:
        """A digest of the content, independent of the path and of the size of the shards."""
        return self.index.digest

    def __len__(self) -> int:
        """The number of tokens."""
        return self.index.tokens

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The end of every document in the array of all tokens."""
        parts = [np.empty(0, np.int64)]
        for number, shard in enumerate(self.index.shards):
            ends = np.asarray(self.map("documents", number), np.int64)
            if len(ends) and (ends[0] < 0 or ends[-1] > shard.tokens or (np.diff(ends) < 0).any()):
                raise DataError(
                    f"{self.folder}/{shard_file('documents', number)} is not a list of document ends",
                    "try meshwright data prepare again",
                )
            parts.append(ends + number * self.index.shard_tokens)
        return np.concatenate(parts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of every document, the end-of-document token included."""
        return np.diff(self.ends, prepend=0)

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        """(token ids, mask) of a document; the mask is None for data without masks."""
        if not 0 <= number < self.index.documents:
            raise IndexError(number)
        start, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        return self.gather("tokens", start, end), self.gather("mask", start, end) if self.index.masked else None

    def gather(self, kind: str, start: int, end: int) -> NDArray[Any]:
        """The token ids or the mask from `start` to `end` in the array of all tokens."""
        size = self.index.shard_tokens
        parts = [
            self.map(kind, number)[max(start - number * size, 0) : end - number * size]
            for number in range(start // size, max(start, end - 1) // size + 1)
            if number < len(self.index.shards)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def map(self, kind: str, number: int) -> NDArray[Any]:
        """The content of a shard file as a read-only array."""
        name = shard_file(kind, number)
        if name in self.open:
            self.open.move_to_end(name)
            return self.open[name]
        shard = self.index.shards[number]
        dtypes: dict[str, np.dtype[Any]] = {"tokens": DTYPES[self.index.dtype], "documents": ENDS, "mask": MASK}
        dtype = dtypes[kind]
        count = shard.documents if kind == "documents" else shard.tokens
        if count == 0:
            return np.empty(0, dtype)
        array = self.files.map(name, dtype, count, shard.digests[kind])
        if kind == "tokens" and number not in self.checked:
            if (largest := int(array.max())) > self.index.largest_id:
                raise DataError(
                    f"{self.folder}/{name} contains token id {largest}, and the largest id of {INDEX} is "
                    f"{self.index.largest_id}",
                    "try meshwright data prepare again",
                )
            self.checked.add(number)
        self.open[name] = array
        while len(self.open) > OPEN_FILES:
            self.open.popitem(last=False)
        return array

    def raise_if_changed(self) -> None:
        """Raises DataError if the folder has other content than when it was opened. Costs one stat per mapped file."""
        self.files.raise_if_changed()
