"""The tokenizers of a user's prompts and completions: bytes, or a tokenizer.json. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from meshwright.base.config import RunConfig
from meshwright.core.data.character_tokenizer import UNKNOWN, before_end
from meshwright.core.data.tokenization import find_run_tokenizer, load_tokenizer, open_encoder


class Tokenizer(Protocol):
    """Text -> token ids, and back."""

    vocab: int
    """the largest token id plus one"""
    end: int | None
    """the token that ends a completion; None: a completion ends at its limit"""
    digest: str
    """a digest of its content"""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion, up to the end token and without it. Token ids without a text are U+FFFD."""
        ...


class TextTokenizer:
    """Bytes, or the tokens of a tokenizer.json, for the prompts of a user."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        vocab: int,
        end: int | None,
        digest: str,
    ) -> None:
        self.encode_text, self.decode_tokens = encode, decode
        self.vocab, self.end, self.digest = vocab, end, digest

    def encode(self, text: str) -> list[int]:
        return self.encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.decode_tokens([int(token) for token in before_end(tokens, self.end)])


def open_text_tokenizer(config: RunConfig) -> TextTokenizer:
    """The tokenizer of a run's data (`data.tokenizer`, or the one beside its initial weights); bytes where there is
    none.
    """
    path = find_run_tokenizer(config) if config.data.kind != "shards" else config.data.sources[0].tokenizer or None
    if path is None:
        encoder = open_encoder(replace(config.data, tokenizer=""), config.model.separator)
        return TextTokenizer(lambda text: list(text.encode()), decode_bytes, 256, encoder.end_of_document, "bytes")
    encoder = open_encoder(replace(config.data, tokenizer=path), config.model.separator)
    tokenizer, digest = load_tokenizer(path)

    def encode(text: str) -> list[int]:
        return list(next(iter(encoder.encode([text], False))))

    def decode(tokens: list[int]) -> str:
        return decode_known(tokenizer, tokens, encoder.vocab)

    return TextTokenizer(encode, decode, encoder.vocab, encoder.end_of_document, digest)


def decode_bytes(tokens: list[int]) -> str:
    """Bytes as UTF-8; those that are none, and token ids above 255, are U+FFFD."""
    return b"".join(bytes([t]) if 0 <= t < 256 else UNKNOWN.encode() for t in tokens).decode(errors="replace")


def decode_known(tokenizer: Any, tokens: list[int], vocab: int) -> str:
    """Decodes ids of a tokenizer.json; a model may have more ids than its tokenizer, which would leave them out."""
    parts: list[str] = []
    known: list[int] = []
    for token in [*tokens, -1]:
        if 0 <= token < vocab:
            known.append(token)
            continue
        parts += [tokenizer.decode(known, skip_special_tokens=False), UNKNOWN]
        known = []
    return "".join(parts[:-1])
