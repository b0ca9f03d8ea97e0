"""Prompts and a reward of your own: a model learns to answer a letter with the same letter, and to stop there.

`meshwright train examples/rl.toml` with `--source rl_reward:PROMPTS --reward rl_reward:reward --rl.task echo` and
`--model.vocab 256` trains on it: the prompts are text, and without a tokenizer every byte is a token.
"""

from __future__ import annotations

from typing import Any

LETTERS = "abcd"
PROMPTS = [{"prompt": f"say {letter}:", "answer": letter} for letter in LETTERS]
"""A prompt per item; what else an item has is for the reward."""


def reward(item: dict[str, Any], completion: str) -> float:
    """1 for the answer alone; partial credit for its first character and for a short completion."""
    if completion == item["answer"]:
        return 1.0
    first = 0.5 if completion.startswith(item["answer"]) else 0.1 if completion[:1] in LETTERS else 0.0
    return (first + 0.2 / len(completion)) if completion else 0.0
