"""Tokenizes inputs to a folder of token shards, in parallel; a command that was killed continues. Torch-free."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from meshwright.base.config import SourceConfig
from meshwright.base.io import atomic_write, read_regular_file
from meshwright.base.store.posix import PosixStore
from meshwright.core.data.chat.template import ChatEncoder, open_chat_encoder, with_end_of_chat
from meshwright.core.data.prepare.assemble import assemble
from meshwright.core.data.prepare.documents import encode_part
from meshwright.core.data.prepare.inputs import InputFile
from meshwright.core.data.prepare.parts import PartFolder, PartRecord
from meshwright.core.data.prepare.progress import Progress
from meshwright.core.data.prepare.readers import PART_BYTES, Part, read_parts
from meshwright.core.data.prepare.workers import map_parts
from meshwright.core.data.shards import DTYPES, INDEX, ShardIndex, TokenShards, read_index
from meshwright.core.data.source import content_digest
from meshwright.core.data.tokenization import MAX_TOKENIZER_BYTES, Encoder, open_encoder
from meshwright.errors import BusyError, ConfigError, DataError

SHARD_TOKENS = 1 << 24
"""Tokens per shard, unless the user asks for another number."""
MAX_SHARD_TOKENS = 1 << 40
PARTS = ".parts"
LOCK = ".lock"


@dataclass(frozen=True)
class Preparation:
    """What decides the contents of the shards: the inputs, how they are encoded, and the size of a shard."""

    files: list[InputFile]
    tokenizer: str
    """tokenizer.json, or empty for bytes"""
    encoder: Encoder
    chat: ChatEncoder | None
    field: str
    dtype: str
    shard_tokens: int

    @classmethod
    def of(
        cls,
        files: list[InputFile],
        source: SourceConfig,
        separator: int | None = None,
        dtype: str = "",
        shard_tokens: int = SHARD_TOKENS,
    ) -> Preparation:
        """The preparation of files by the settings of a source. The type of the ids follows from the vocabulary."""
        encoder = open_encoder(with_end_of_chat(source, separator), separator)
        chat = open_chat_encoder(source, separator) if source.kind == "chat" else None
        dtype = dtype or ("uint16" if encoder.vocab <= 1 << 16 else "uint32")
        return cls(files, source.tokenizer, encoder, chat, source.field, dtype, shard_tokens)

    @property
    def key(self) -> str:
        """A digest of the settings that decide the ids."""
        encoder = self.encoder.digest if self.chat is None else self.chat.digest
        return content_digest("parts", encoder, self.encoder.end_of_document, self.field, self.dtype, PART_BYTES)

    def parts(self) -> Iterator[Part]:
        """The parts of all inputs, each with its key."""
        for part in read_parts(self.files, self.field if self.chat is None else None):
            content = xxhash.xxh3_128_hexdigest(part.content)
            yield replace(part, key=content_digest(self.key, part.file.format, part.final, content))


def prepare_shards(
    preparation: Preparation,
    out: Path,
    *,
    workers: int,
    skip_budget: int,
    hint: str,
    empty_hint: str,
    name: str = "the input",
    cached: bool = False,
) -> ShardIndex:
    """Writes the shards to `out`, or finds that they are there. `hint` says how to skip lines that cannot be decoded,
    and `empty_hint` what to try if there is no token.

    A folder of the cache is `cached`: two commands wait for each other, and parts of inputs with an error are removed.
    """
    with locked(out, cached) as lock:
        folder = PartFolder(out / PARTS, DTYPES[preparation.dtype])
        folder.require_folder()
        if (out / INDEX).exists():
            index = read_index(PosixStore(out), out)
            if index.inputs != content_digest(*(part.key for part in preparation.parts())):
                raise ConfigError(
                    f"--out {out} has shards of other inputs or settings", "try another folder, or delete this one"
                )
            if index.shard_tokens != preparation.shard_tokens:
                raise ConfigError(
                    f"--out {out} has shards of {index.shard_tokens:,} tokens, and --shard-tokens is "
                    f"{preparation.shard_tokens:,}",
                    f"try --shard-tokens {index.shard_tokens}, another folder, or delete this one",
                )
            damage = find_damage(out)
            if damage is None:
                folder.remove()
                return index
            print(f"{damage.message}; the shards are written again", file=sys.stderr, flush=True)
            (out / INDEX).unlink()
        folder.root.mkdir(exist_ok=True)
        try:
            records, inputs = encode_parts(preparation, folder, workers, skip_budget, hint, lock)
            if not any(record.tokens for record in records):
                raise DataError(f"{name} is empty: no line could be decoded", empty_hint)
        except (ConfigError, DataError):
            if cached:
                folder.remove()
            raise
        if preparation.tokenizer:
            write_tokenizer(preparation.tokenizer, preparation.encoder.digest, out)
        index = assemble(out, folder, records, preparation.encoder, preparation.shard_tokens, inputs)
        folder.remove()
        return index


def find_damage(out: Path) -> DataError | None:
    """The error of the first file of a folder of shards that is missing or does not have the size and the digest of the
    index.
    """
    shards = TokenShards(out)
    try:
        for number, shard in enumerate(shards.index.shards):
            for kind in shard.digests:
                shards.map(kind, number)
    except DataError as error:
        return error
    return None


def write_tokenizer(path: str, digest: str, out: Path) -> None:
    """Copies the tokenizer.json to the shards, which decode their text by it."""
    content = read_regular_file(Path(path), MAX_TOKENIZER_BYTES, path, "a tokenizer.json file")
    if content_digest(content) != digest:
        raise DataError(f"{path} has changed", "try the same command again")
    atomic_write(out / "tokenizer.json", content.decode())


def encode_parts(
    preparation: Preparation, folder: PartFolder, workers: int, skip_budget: int, hint: str, lock: int
) -> tuple[list[PartRecord], str]:
    """The records of all parts, and the digest of the inputs. A part that an earlier command has written is reused."""
    records: dict[int, PartRecord] = {}
    keys: list[str] = []
    total = sum(file.path.stat().st_size for file in preparation.files if file.path.exists())
    budget = SkipBudget(skip_budget, hint)

    def missing_parts() -> Iterator[Part]:
        for part in preparation.parts():
            keys.append(part.key)
            record = folder.find(part.number, part.key)
            if record is None:
                yield part
            else:
                progress.add(part.consumed, record.tokens, resumed=True)
                records[part.number] = record

    def work(part: Part) -> PartRecord:
        encoded = encode_part(part, preparation.chat or preparation.encoder, preparation.field, skip_budget)
        return folder.write(part, encoded, keep=len(encoded.bad) <= skip_budget)

    with Progress(total) as progress:
        for part, record in map_parts(work, missing_parts(), workers, (lock,)):
            records[part.number] = record
            progress.add(part.consumed, record.tokens, resumed=False)
            budget.spend(records)
    budget.spend(records)
    return [records[number] for number in range(len(keys))], content_digest(*keys)


class SkipBudget:
    """Counts the lines that could not be decoded, in the order of the inputs, so that an error names the same line
    whatever the number of workers.
    """

    def __init__(self, budget: int, hint: str) -> None:
        self.left, self.hint, self.next_part = budget, hint, 0

    def spend(self, records: dict[int, PartRecord]) -> None:
        while (record := records.get(self.next_part)) is not None:
            if len(record.bad) > self.left:
                row, reason, hint = record.bad[self.left]
                message = f"source {record.file} {record.row_name} {row} cannot be decoded: {reason}"
                raise ConfigError(message, hint) if hint else DataError(message, self.hint)
            self.left -= len(record.bad)
            self.next_part += 1


@contextmanager
def locked(out: Path, wait: bool) -> Iterator[int]:
    """Creates the folder and locks it; a lock ends with its process, however that ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(out))
        if names and not names & {INDEX, LOCK}:
            raise ConfigError(
                f"--out {out} is not empty", "expected a new folder, or one that data prepare has written"
            )
        lock = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}", "expected a writable folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield lock
    except BlockingIOError:
        raise BusyError(f"another data prepare is writing to {out}", "try to wait for it, or another --out") from None
    finally:
        os.close(lock)
