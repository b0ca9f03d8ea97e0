"""Decodes the samples of a run to text, document by document. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX, RunConfig, SourceConfig, load_config
from meshwright.base.io import read_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.data.chat.packing import PackedChats, SourceWithDocuments
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.shard_source import ShardSource
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.data.token_files import SEPARATOR_BYTE
from meshwright.core.data.tokenization import find_end_of_document, find_tokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError


@dataclass(frozen=True)
class SampleDecoder:
    """Token ids -> text, and the token that ends a document."""

    decode: Callable[[list[int]], str]
    end_of_document: int | None
    padded: bool = False
    """whether masked zeros follow the documents of a sample"""

    def documents(self, sample: Sequence[NDArray[Any]]) -> list[str]:
        """The texts of the documents of a sample: (tokens, labels), or (tokens, labels, documents) of packed data."""
        tokens, labels = np.asarray(sample[0]), np.asarray(sample[1])
        if self.padded:
            used = np.flatnonzero((tokens != 0) | (labels != IGNORE_INDEX))
            sample = [entry[: used.max(initial=0) + 1] for entry in sample]
            tokens = sample[0]
        if len(sample) > 2:
            starts = np.flatnonzero(np.diff(np.asarray(sample[2]))) + 1
        elif self.end_of_document is not None:
            starts = np.flatnonzero(tokens == self.end_of_document) + 1
        else:
            starts = np.empty(0, np.int64)
        pieces = [piece for piece in np.split(tokens, starts) if len(piece)]
        return [self.decode(piece[piece != self.end_of_document].tolist()) for piece in pieces]


def read_texts(run: Path, samples: Sequence[int], tokenizer: str) -> list[dict[str, Any]]:
    """The text of samples of a run folder or a run file: their source, index and documents.

    `tokenizer` is used for token files, whose config names none.
    """
    config = load_config(RunFolder(run).run_file if run.is_dir() else run)
    config.require_built_in_model()
    sources = open_sources(config.data, config.model.vocab, config.model.separator)
    if run.is_dir():
        require_same_data(RunFolder(run).identity_file, sources)
    all_samples, texts = ConcatenatedSource(sources), []
    decoders: dict[int, SampleDecoder] = {}
    for sample in samples:
        source, index = all_samples.locate(sample)
        number = sources.index(source)
        if number not in decoders:
            decoders[number] = open_decoder(config.data.sources[number], source, config, tokenizer)
        documents = decoders[number].documents(source[index])
        texts.append({"sample": sample, "source": source.name, "source_index": index, "documents": documents})
    return texts


def require_same_data(identity: Path, sources: Sequence[Source]) -> None:
    """Raises DataError unless the data is that of the run."""
    try:
        expected = [source["fingerprint"] for source in read_json(identity)["sources"]]
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{identity} is not a valid identity record ({error!r})", "try another run folder") from None
    if expected != [source.fingerprint() for source in sources]:
        raise DataError("the data is not that of the run: its fingerprint differs", "try to restore the data")


def open_decoder(settings: SourceConfig, source: Source, config: RunConfig, tokenizer: str) -> SampleDecoder:
    """The decoder of a source."""
    source = source.source if isinstance(source, SourceWithDocuments) else source
    if isinstance(source, ShardSource | PackedChats):
        index, padded = source.shards.index, isinstance(source, PackedChats)
        if index.tokenizer == "bytes":
            return SampleDecoder(decode_bytes, index.end_of_document, padded)
        path = str(source.shards.folder / "tokenizer.json")
        loaded, digest = load_tokenizer(path)
        if digest != index.tokenizer:
            raise DataError(f"{path} is not the tokenizer of the shards", "try to restore it")
        return SampleDecoder(decode_tokens(loaded), index.end_of_document, padded)
    if settings.kind == "synthetic":
        raise ConfigError("the samples of a synthetic source are random token ids", "try it without --text")
    if settings.kind == "tokens" and not (tokenizer or settings.tokenizer):
        raise ConfigError("token files do not name their tokenizer", "try --tokenizer FILE")
    if settings.kind == "stdlib" or not (tokenizer or settings.tokenizer):
        end = None if settings.kind != "stdlib" and settings.end_of_document == "none" else SEPARATOR_BYTE
        return SampleDecoder(decode_bytes, end)
    settings = replace(settings, tokenizer=settings.tokenizer or str(find_tokenizer(tokenizer)))
    loaded, _ = load_tokenizer(settings.tokenizer)
    try:
        end = find_end_of_document(settings, loaded, config.model.separator)
    except DataError:  # of token files it is not known
        end = None
    return SampleDecoder(decode_tokens(loaded), end)


def decode_bytes(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode(errors="replace")


def decode_tokens(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
