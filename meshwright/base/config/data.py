"""The settings of the sample stream: one source or a mixture, and how samples are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from meshwright.base.config.constraints import (
    PLACEMENT,
    NonNegativeInt,
    PositiveFloat,
    Range,
)
from meshwright.errors import ConfigError

TOKENIZED_KINDS = ("text", "jsonl", "chat")
"""The kinds of sources whose text a tokenizer encodes."""
FILE_KINDS = ("tokens", *TOKENIZED_KINDS, "shards")
SOURCE_KINDS = {
    "path": FILE_KINDS,
    "dtype": ("tokens",),
    "tokenizer": FILE_KINDS,
    "end_of_document": FILE_KINDS,
    "field": ("jsonl",),
    "chat_template": ("chat",),
    "packing": ("chat", "shards"),
    "samples": ("synthetic",),
    "shard_cache": ("shards",),
}
"""Setting of a source -> the kinds that read it; the others are read by all. `sample` reads the tokenizer, and the end
of a document, of files of token ids.
"""
TOKENIZER_FILE = "tokenizer.json"
BYTES = "bytes"
"""data.tokenizer: every byte is a token, whatever tokenizer the initial weights come with."""
INIT_FROM = "init_from"
"""data.tokenizer: the tokenizer.json of the folder of `init_from`."""


@dataclass(frozen=True)
class SourceConfig:
    """One data source."""

    kind: Literal["stdlib", "tokens", "text", "jsonl", "chat", "shards", "synthetic"] = "stdlib"
    """stdlib: source code of the Python standard library; tokens: binary files of token ids; text, jsonl: files to
    tokenize; chat: JSONL files of chats, with the loss on answers alone; shards: a folder that data prepare has
    written; synthetic: random token ids, seeded by the index of the sample
    """
    path: Annotated[str, PLACEMENT] = ""
    """file, folder or glob pattern of a tokens, text, jsonl or chat source; the folder or URL of a shards source"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """type of the token ids in a tokens file"""
    tokenizer: Annotated[str, PLACEMENT] = ""
    """tokenizer.json for a text, jsonl or chat source; init_from: the one of that folder; bytes: every byte is a token;
    empty: init_from if that folder has a tokenizer.json, else bytes. The content of the file is part of the run's
    identity, its path is not
    """
    end_of_document: str = "auto"
    """token that ends each document of a text or jsonl source: a token of the tokenizer, none, or auto, which is
    model.separator if it is set, else the tokenizer's end-of-text token (for bytes: 0)
    """
    field: str = "text"
    """field of a JSONL record that contains the text"""
    chat_template: Annotated[str, PLACEMENT] = ""
    """template in Jinja of a chat source; empty: the one beside the tokenizer (chat_template.jinja or
    tokenizer_config.json), else ChatML. Its content is part of the run's identity, its path is not
    """
    packing: bool = True
    """chat: several chats per sample, between which attention does not look; false: one chat per sample"""
    samples: Annotated[int, Range(minimum=1, maximum=1 << 62)] = 1_000_000
    """number of samples of a synthetic source"""
    weight: PositiveFloat = 1.0
    """weight of this source in a mixture; samples are drawn in proportion to the weights"""

    def __post_init__(self) -> None:
        if self.kind in FILE_KINDS and not self.path:
            raise ConfigError(
                f"data.path is empty, and data.kind = {self.kind} reads files",
                "expected a file, a folder or a glob pattern",
            )


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The sample stream: one source, or a weighted mixture of several."""

    mixture: tuple[SourceConfig, ...] = ()
    """sources of a mixture; if set, the keys of the single source are refused, except tokenizer, chat_template and
    end_of_document, which apply to every source that does not set its own
    """
    sequence: Annotated[int, Range(minimum=2, maximum=1 << 24)] = 128
    """sequence length: tokens per sample"""
    on_bad_sample: Literal["stop", "quarantine"] = "stop"
    """what happens if a sample cannot be decoded: stop the run, or quarantine: train with all its labels masked"""
    bad_sample_budget: NonNegativeInt = 100
    """number of quarantined samples after which the run stops"""
    workers: Annotated[int, Range(minimum=0, maximum=256), PLACEMENT] = 0
    """data loader workers per rank; 0 decodes in the training thread, which suits tokens that are in memory"""
    worker_kind: Annotated[Literal["thread", "process"], PLACEMENT] = "thread"
    """thread for cheap decoding, process for decoding that holds the global interpreter lock"""
    shard_cache: Annotated[NonNegativeInt, PLACEMENT] = 0
    """size in bytes of the local cache for shards sources; 0: shards are mapped from their folder, and those of a URL
    have a cache of 64 GiB
    """
    prefetch: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 4
    """micro-batches that the workers prepare ahead"""

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether there is text whose tokenizer no setting names."""
        return not self.tokenizer and any(
            source.kind in TOKENIZED_KINDS and not source.tokenizer for source in self.mixture or (self,)
        )

    def with_renamed_tokenizer(self, old: str, new: str) -> DataConfig:
        """The same with the tokenizer `new` wherever a setting names `old`."""
        mixture = tuple(replace(item, tokenizer=new) if item.tokenizer == old else item for item in self.mixture)
        return replace(self, tokenizer=new if self.tokenizer == old else self.tokenizer, mixture=mixture)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the mixture, completed by the settings that apply to all of them, or the one source. Their
        tokenizer is a file, or empty for bytes.
        """
        sources = [
            replace(
                source,
                tokenizer=source.tokenizer or self.tokenizer,
                chat_template=source.chat_template or self.chat_template,
                end_of_document=self.end_of_document if source.end_of_document == "auto" else source.end_of_document,
            )
            for source in self.mixture
        ]
        return tuple(
            replace(source, tokenizer="") if source.tokenizer == BYTES else source for source in sources or [self]
        )
