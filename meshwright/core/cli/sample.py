"""meshwright sample: generates text from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import AtStep, Json, option, positional
from meshwright.base.terminal.output import emit_json


def sample(
    run: Annotated[Path, positional("RUN", "run folder, checkpoint folder, or exported folder")],
    prompt: Annotated[tuple[str, ...], option("TEXT", "text to continue; may be given several times")],
    tokens: Annotated[int, option("N", "largest number of tokens to generate per prompt")] = 100,
    temperature: Annotated[float, option("T", "divides the logits; 0 chooses the most likely token")] = 1.0,
    top_k: Annotated[int, option("K", "choose from the K most likely tokens; 0: from all")] = 0,
    top_p: Annotated[float, option("P", "choose from the most likely tokens whose probabilities sum to P")] = 1.0,
    seed: Annotated[int, option("N", "seed of the random numbers")] = 0,
    tokenizer: Annotated[str, option("FILE", "tokenizer.json (default: that of the run's data, or bytes)")] = "",
    step: AtStep = None,
    json: Json = False,
) -> None:
    """Sample: generate text after prompts, from a checkpoint of any layout."""
    from dataclasses import asdict

    from meshwright.core.generate.samples import sample_run
    from meshwright.core.generate.settings import SamplingConfig

    stream = TerminalStream(prompt)
    config = SamplingConfig(tokens, temperature, top_k, top_p, seed)
    samples = sample_run(run, prompt, config, step, tokenizer, ignore_text if json else stream.add)
    if json:
        rows = [asdict(sample) for sample in samples]
        emit_json({"checkpoint": rows[0]["checkpoint"], "samples": rows})
    else:
        stream.finish()


def ignore_text(_prompt: int, _text: str) -> None:
    """JSON is printed at the end."""


class TerminalStream:
    """Prints the prompts with their texts one after the other, each as far as it is known."""

    def __init__(self, prompts: tuple[str, ...]) -> None:
        self.prompts, self.waiting = prompts, [""] * len(prompts)
        self.current = -1

    def add(self, row: int, text: str) -> None:
        """Prints new text of the first prompt; that of the others waits."""
        self.waiting[row] += text
        if self.current < 0:
            self._next_prompt()
        self._print(self.current)

    def finish(self) -> None:
        """Prints what waits."""
        while self.current < len(self.prompts) - 1:
            if self.current >= 0:
                write("\n\n")
            self._next_prompt()
            self._print(self.current)
        write("\n")

    def _next_prompt(self) -> None:
        self.current += 1
        write(visible(self.prompts[self.current]))

    def _print(self, row: int) -> None:
        write(visible(self.waiting[row]))
        self.waiting[row] = ""


def write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def visible(text: str) -> str:
    """Replaces control characters, which would change the state of a terminal, by their escape sequences."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )
