"""`sample` as a function: generates text from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.base.cli.python_args import errors_for_python, given_run
from meshwright.core.generate.settings import Sample, SamplingConfig


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
    from meshwright.core.generate.samples import sample_run

    with errors_for_python():
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        config = SamplingConfig(tokens, temperature, top_k, top_p, seed)
        return sample_run(given_run(run, "run"), texts, config, step, tokenizer, on_text or ignore_text)


def ignore_text(_prompt: int, _text: str) -> None:
    """Text that nobody waits for."""
