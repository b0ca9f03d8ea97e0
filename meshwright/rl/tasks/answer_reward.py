"""The reward of a task's completion: 1 for the exact answer, and partial credit that leads to it. Torch-free.

The partial credit is the same rule for every task; `Task.answers` says which characters are valid, so it differs in
what counts as valid: digits and the minus sign for `arithmetic`, letters and digits for `strings`, `t`, `f` and the
names a to e for `logic`. It has three parts, and is at most 0.8:

- VALID: the share of the characters of the completion that are valid;
- LENGTH: the shorter of the two lengths divided by the longer one, so that a model learns to end its answer;
- PREFIX: the share of the answer that the completion begins with.

Each part grows with what it measures, and an empty completion has none of them. A model that has not learnt anything
is rewarded for valid characters, for shorter completions and for first characters that are right by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from meshwright.rl.tasks.registry import TASKS

EXACT = 1.0
PREFIX = 0.5
LENGTH = 0.2
VALID = 0.1


def answer_reward(item: Mapping[str, Any], completion: str) -> float:
    """The reward of the completion of a task's prompt, from 0 to 1: a function of its arguments."""
    answer: str = item["answer"]
    if completion == answer:
        return EXACT
    if not completion:
        return 0.0
    valid = sum(character in TASKS[item["task"]].answers for character in completion)
    lengths = len(completion), len(answer)
    prefix = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(completion, answer, strict=False)))
    return VALID * valid / lengths[0] + LENGTH * min(lengths) / max(lengths) + PREFIX * prefix / lengths[1]
