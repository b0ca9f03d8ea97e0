"""Generates text after prompts with the model of a checkpoint, and passes it on as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.core.generate.generation import generate
from meshwright.core.generate.load import load_model
from meshwright.core.generate.settings import Sample, SamplingConfig
from meshwright.core.generate.text import find_end_tokens, open_codec
from meshwright.errors import ConfigError


def sample_run(
    run: Path,
    prompts: Sequence[str],
    config: SamplingConfig,
    step: int | None,
    tokenizer: str,
    on_text: Callable[[int, str], None],
) -> list[Sample]:
    """The samples of all prompts. `on_text` gets the number of a prompt and new text."""
    for number, text in enumerate(prompts, 1):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"prompt {number} is not valid UTF-8", "expected text")
    loaded = load_model(run, step)
    codec = open_codec(loaded.config, loaded.folder, tokenizer)
    end_tokens = find_end_tokens(loaded.config, loaded.folder, tokenizer)
    if codec.end_token is not None:
        end_tokens.add(codec.end_token)
    encoded = [codec.encode(text) for text in prompts]
    streams = [codec.new_stream() for _ in prompts]
    texts = [""] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)

    def add(row: int, text: str) -> None:
        texts[row] += text
        if text:
            on_text(row, text)

    for new in generate(loaded.model, loaded.spec, encoded, config, end_tokens):
        for row, token in enumerate(new):
            if token is None:
                continue
            if token in end_tokens:
                ended[row] = True
            else:
                tokens[row].append(token)
                add(row, streams[row].add(token))
    for row, stream in enumerate(streams):
        add(row, stream.finish())
    return [Sample(*of_prompt, loaded.name) for of_prompt in zip(prompts, texts, tokens, ended, strict=True)]
