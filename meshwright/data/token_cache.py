"""The cache of tokenized files: token ids with number and digest, durable, and verified when opened. Torch-free."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.errors import DataError
from meshwright.io import open_regular_file, sync_folder

TRAILER = struct.Struct("<8sQ16s")  # magic, number of token ids, xxh3_128 of the token ids
MAGIC = b"MESHTOK1"
DTYPE = np.dtype("<u4")
BLOCK = 1 << 22
"""Token ids that are hashed at once."""


def cache_folder() -> Path:
    """The folder of the cache: $MESHWRIGHT_CACHE or ~/.cache/meshwright."""
    return Path(os.environ.get("MESHWRIGHT_CACHE") or Path.home() / ".cache" / "meshwright")


def write_token_cache(file: Path, documents: Iterable[list[int]]) -> None:
    """Writes token ids under a temporary name, makes them durable, and renames them to `file`.

    Several processes may write the same file at once: each renames a complete one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    count, digest = 0, xxhash.xxh3_128()
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as temporary:
        try:
            for ids in documents:
                content = np.asarray(ids, DTYPE).tobytes()
                count += len(ids)
                digest.update(content)
                temporary.write(content)
            temporary.write(TRAILER.pack(MAGIC, count, digest.digest()))
            temporary.flush()
            os.fsync(temporary.fileno())
            os.replace(temporary.name, file)
            sync_folder(file.parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary.name)
            raise


def open_token_cache(file: Path) -> NDArray[np.uint32]:
    """The token ids of a cache file as a read-only memory map; raises DataError if the file is damaged."""
    try:
        with open_regular_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - TRAILER.size))
            trailer = opened.read(TRAILER.size)
            if len(trailer) != TRAILER.size:
                raise DataError(f"token cache {file} has only {size} bytes", "try to delete it")
            magic, count, digest = TRAILER.unpack(trailer)
            if magic != MAGIC or size != count * DTYPE.itemsize + TRAILER.size:
                raise DataError(f"token cache {file} is truncated: it has {size:,} bytes", "try to delete it")
            ids = np.memmap(opened, DTYPE, "r", shape=(count,)) if count else np.empty(0, DTYPE)
    except OSError as error:
        raise DataError(f"token cache {file} cannot be read: {error.strerror}", "try to delete it") from None
    if digest_blocks(ids[start : start + BLOCK] for start in range(0, count, BLOCK)) != digest:
        raise DataError(f"token cache {file} does not match its digest", "try to delete it")
    return ids


def digest_blocks(blocks: Iterator[NDArray[Any]]) -> bytes:
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(np.ascontiguousarray(block).data)
    return bytes(state.digest())
