"""The task `strings`: operations on words of letters. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.rl.tasks.draws import Draws
from meshwright.rl.tasks.task import Problem, Task, TaskLevel

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FOLLOWING = str.maketrans(LETTERS, LETTERS[1:] + LETTERS[0])
"""Every letter -> the next one of the alphabet; z -> a."""
OPERATIONS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "next": lambda word: word.translate(FOLLOWING),
}


def apply(operation: str, letters: str, low: int, high: int, draws: Draws) -> Problem:
    word = draws.text(letters, low, high)
    return f"{operation} {word}=", OPERATIONS[operation](word)


def count(draws: Draws) -> Problem:
    """How often a letter occurs in a word of four different ones."""
    word = draws.text("abcd", 3, 9)
    letter = draws.choice("abcd")
    return f"count {letter} {word}=", str(word.count(letter))


def apply_two(draws: Draws) -> Problem:
    """Two operations; the one beside the word comes first: `reverse sort cab` is cba."""
    outer, inner = draws.choice(["reverse", "next"]), draws.choice(["sort", "next"])
    word = draws.text(LETTERS, 4, 8)
    return f"{outer} {inner} {word}=", OPERATIONS[outer](OPERATIONS[inner](word))


STRINGS = Task(
    "strings",
    LETTERS + "0123456789",
    (
        TaskLevel("copy one of four letters", partial(apply, "copy", "abcd", 1, 1), 7, 1),
        TaskLevel("copy two or three letters", partial(apply, "copy", LETTERS, 2, 3), 9, 3),
        TaskLevel("copy four to six letters", partial(apply, "copy", LETTERS, 4, 6), 12, 6),
        TaskLevel("reverse two or three letters", partial(apply, "reverse", LETTERS, 2, 3), 12, 3),
        TaskLevel("reverse four to six letters", partial(apply, "reverse", LETTERS, 4, 6), 15, 6),
        TaskLevel("sort three to five letters", partial(apply, "sort", LETTERS, 3, 5), 11, 5),
        TaskLevel("replace three to five letters by the next ones", partial(apply, "next", LETTERS, 3, 5), 11, 5),
        TaskLevel("count a letter in a word", count, 18, 1),
        TaskLevel("two operations, one after the other", apply_two, 22, 8),
    ),
)
