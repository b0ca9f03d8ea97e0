"""The tokenizer of the built-in tasks of reinforcement learning: one token per character. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import DataError

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=()&|!^"
"""The characters of the tasks; that with index i is token i + 1."""
END = 0
"""The token that ends a completion."""
UNKNOWN = "\ufffd"
"""The text of a token that has none."""


class CharacterTokenizer:
    """One token per character, for the tasks: few tokens, so that a small model can learn by rewards alone."""

    vocab = len(CHARACTERS) + 1
    end: int | None = END
    digest = f"characters {CHARACTERS}"

    def encode(self, text: str) -> list[int]:
        """Raises DataError for a character that has no token."""
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise DataError(f"the text {text!r} has the character {unknown[0]!r}", f"expected only {CHARACTERS!r}")
        return [CHARACTERS.index(character) + 1 for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        kept = before_end(tokens, self.end)
        return "".join(CHARACTERS[token - 1] if 0 < token < self.vocab else UNKNOWN for token in kept)


def before_end(tokens: Sequence[int], end: int | None) -> Sequence[int]:
    """The tokens before the first end token."""
    return next((tokens[:index] for index, token in enumerate(tokens) if token == end), tokens)
