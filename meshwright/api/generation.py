"""`sample` as a function: generates text from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.api.python_args import errors_for_python, given_path


@dataclass(frozen=True)
class Sample:
    """What `meshwright.sample` returns for a prompt."""

    prompt: str
    text: str
    """generated text, without the prompt"""
    tokens: list[int]
    """generated tokens"""
    ended: bool
    """whether the text ended with the end-of-document token, which it does not contain"""
    checkpoint: str
    """name of the checkpoint"""


def sample(
    run: str | Path,
    prompts: str | Sequence[str],
    *,
    tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    tokenizer: str = "",
    on_text: Callable[[int, str], None] | None = None,
) -> list[Sample]:
    """Generates text after each prompt with the model of a checkpoint, in this process.

    A prompt gets the same text in every batch; equal prompts of one batch get different ones.

    Args:
        run: run folder, checkpoint folder, or a folder that ``meshwright checkpoint export`` or transformers wrote.
        prompts: one text, or several.
        tokens: largest number of tokens to generate per prompt. A text ends earlier at the end-of-document token.
        temperature: divides the logits. 0 chooses the most likely token.
        top_k: number of most likely tokens to choose from. 0: all.
        top_p: chooses from the most likely tokens whose probabilities sum to this.
        seed: seed of the random numbers.
        step: step of the checkpoint. Default: the newest.
        tokenizer: tokenizer.json. Default: that of the run's data; without one, bytes are tokens.
        on_text: called with the number of the prompt and new text, as soon as it is complete.

    Returns:
        list[Sample]: text and tokens of each prompt.

    Raises:
        ConfigError: an argument is not valid, or the model is a custom one.
        CheckpointError: there is no intact checkpoint.

    Example::

        >>> import meshwright
        >>> [answer] = meshwright.sample("runs/tiny", "def ", tokens=40, temperature=0)
        >>> answer.text
    """
    from meshwright.generate.generation import generate
    from meshwright.generate.load import load_model
    from meshwright.generate.sampling import SamplingConfig
    from meshwright.generate.text import open_codec

    with errors_for_python():
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        config = SamplingConfig(tokens, temperature, top_k, top_p, seed)
        loaded = load_model(given_path(run, "run"), step)
        codec = open_codec(loaded.config, loaded.folder, tokenizer)
        encoded = [codec.encode(text) for text in texts]
        streams = [codec.new_stream() for _ in texts]
        pieces: list[list[str]] = [[] for _ in texts]
        ids: list[list[int]] = [[] for _ in texts]
        ended = [False] * len(texts)

        def add(row: int, text: str) -> None:
            pieces[row].append(text)
            if on_text is not None and text:
                on_text(row, text)

        for new in generate(loaded.model, loaded.spec, encoded, config, codec.end_token):
            for row, token in enumerate(new):
                if token is None:
                    continue
                if token == codec.end_token:
                    ended[row] = True
                else:
                    ids[row].append(token)
                    add(row, streams[row].add(token))
        for row, stream in enumerate(streams):
            add(row, stream.finish())
    return [Sample(text, "".join(pieces[row]), ids[row], ended[row], loaded.name) for row, text in enumerate(texts)]
