"""A task: levels of difficulty, each a pure function from the index of a prompt to its text and answer. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.rl.tasks.draws import Draws

Problem = tuple[str, str]
"""The text of a prompt, and its answer."""


@dataclass(frozen=True)
class TaskLevel:
    """One level of a task."""

    title: str
    """what the prompts ask for"""
    make: Callable[[Draws], Problem]
    prompt: int
    """characters of the longest prompt"""
    answer: int
    """characters of the longest answer"""


@dataclass(frozen=True)
class Task:
    """Prompts with verifiable answers."""

    name: str
    answers: str
    """the characters of which answers consist"""
    levels: tuple[TaskLevel, ...]
    """those of levels 1 to 9"""

    def problem(self, level: int, index: int) -> Problem:
        """The text and the answer of a prompt: a function of the task, the level and the index alone."""
        return self.levels[level - 1].make(Draws(f"{self.name}/{level}/{index}"))
