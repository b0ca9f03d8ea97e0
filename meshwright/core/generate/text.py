"""Text of prompts and of generated tokens: encodes by the tokenizer of the run, and decodes token by token."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.base.config import RunConfig
from meshwright.base.config.reader import format_value
from meshwright.base.models.config_fields import read_config_file
from meshwright.core.data.character_tokenizer import CharacterTokenizer
from meshwright.core.data.sample_text import decode_tokens
from meshwright.core.data.token_files import SEPARATOR_BYTE
from meshwright.core.data.tokenization import find_end_of_document, find_run_tokenizer, has_tokenizer, load_tokenizer
from meshwright.core.weights.folder import CONFIG_FILE
from meshwright.core.weights.huggingface_files import GENERATION_FILE
from meshwright.errors import ConfigError, DataError

INCOMPLETE = "\ufffd"
"""The character that a decoder writes for bytes that are not a complete character."""


@dataclass(frozen=True)
class TextCodec:
    """Text <-> token ids."""

    encode: Callable[[str], list[int]]
    new_stream: Callable[[], TextStream]
    """makes the decoder of one generated text"""
    end_token: int | None
    """the token that ends a document"""


class TextStream(Protocol):
    """Decodes a text token by token: `add` returns the characters that are complete, `finish` the rest."""

    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


class ByteStream:
    """Tokens are bytes of UTF-8; a byte that belongs to no character, and a token that is no byte, becomes U+FFFD."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < 256 else self.finish() + INCOMPLETE

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


class TokenizerStream:
    """Decodes the last tokens together, since a character may need several tokens and a tokenizer may write a space
    between two of them.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.shown = 0
        """the tokens whose text was returned"""
        self.context = 0
        """where the tokens that are decoded again begin"""

    def add(self, token: int) -> str:
        self.ids.append(token)
        return self._new_text(final=False)

    def finish(self) -> str:
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self.decode(self.ids[self.context : self.shown])
        text = self.decode(self.ids[self.context :])
        if len(text) <= len(before) or (text.endswith(INCOMPLETE) and not final):
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


def open_codec(config: RunConfig, folder: Path | None = None, tokenizer: str = "") -> TextCodec:
    """The codec of a run: `tokenizer`, that of the run's data, of the folder of its weights, that of its task of
    reinforcement learning, or bytes. `folder` is that of an export.
    """
    file = find_run_tokenizer(config, folder, tokenizer)
    if file is None and config.rl.has_task:
        characters = CharacterTokenizer()
        return TextCodec(characters.encode, lambda: TokenizerStream(characters.decode), characters.end)
    if file is None:
        end = None if config.data.end_of_document == "none" else SEPARATOR_BYTE
        return TextCodec(lambda text: list(text.encode()), ByteStream, end)
    loaded, _ = load_tokenizer(file)
    try:
        end = find_end_of_document(replace(config.data, tokenizer=file), loaded, config.model.separator)
    except DataError:  # the tokenizer has no known token
        end = None
    decode = decode_tokens(loaded)
    return TextCodec(lambda text: encode_prompt(loaded, text, end), lambda: TokenizerStream(decode), end)


def find_end_tokens(config: RunConfig, folder: Path | None = None, tokenizer: str = "") -> set[int]:
    """The tokens that end a text by the generation_config.json, else by the config.json, of the folder of an export or
    of the initial weights; none if these have another tokenizer than the run.
    """
    weights = folder or (Path(config.init_from) if config.init_from else None)
    if (
        folder is None
        and weights is not None
        and not has_tokenizer(weights, find_run_tokenizer(config, None, tokenizer))
    ):
        return set()
    for file in (weights / GENERATION_FILE, weights / CONFIG_FILE) if weights is not None else ():
        tree = read_config_file(file) if file.is_file() else None
        found = tree.get("eos_token_id") if isinstance(tree, dict) else None
        if found is not None:
            tokens = found if isinstance(found, list) else [found]
            if not all(type(token) is int for token in tokens):
                raise ConfigError(
                    f"{file} has eos_token_id = {format_value(found)}", "expected a token id or a list of token ids"
                )
            return set(tokens)
    return set()


def encode_prompt(tokenizer: Any, text: str, end: int | None) -> list[int]:
    """The tokens of a text with those that the tokenizer puts before it, and without the end of the document."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
    return ids[:-1] if len(ids) > 1 and ids[-1] == end and not text_ends_with(tokenizer, text, end) else ids


def text_ends_with(tokenizer: Any, text: str, token: int | None) -> bool:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(ids) and ids[-1] == token
