"""What a lab is: a problem, the functions to write, hints, and the checks that grade them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright_practice.labs.work import Work

PACKAGE = "meshwright_practice.labs"
FILE_CHECK = "file"
"""The first check of every lab: the file runs, and defines the functions."""


@dataclass(frozen=True)
class LabFunction:
    """A function that the user writes. Checks pass the parameters by position, so their names may differ."""

    name: str
    parameters: tuple[str, ...]
    returns: str
    purpose: str
    """what the function does, as a sentence"""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.parameters)}) -> {self.returns}"


@dataclass(frozen=True)
class Lab:
    """One lab. Its folder has the starter, the solution and the checks; `checks` are the names of all checks in order,
    after the check of the file itself.
    """

    id: str
    title: str
    problem: str
    functions: tuple[LabFunction, ...]
    checks: tuple[str, ...]
    hints: tuple[str, ...]
    """from the first nudge to nearly the code"""
    items: tuple[int, ...] = ()
    """numbers of the handbook items that this lab makes real"""
    chapter: str = ""
    """page of the handbook, such as handbook/sharding.md"""
    suffix: str = ".py"
    """suffix of the user's file: a lab whose answer is text has another one"""

    @property
    def all_checks(self) -> tuple[str, ...]:
        return (FILE_CHECK, *self.checks)

    def starter(self) -> str:
        return files(f"{PACKAGE}.{self.id}").joinpath(f"starter{self.suffix}").read_text()

    def solution(self) -> str:
        return files(f"{PACKAGE}.{self.id}").joinpath(f"solution{self.suffix}").read_text()

    def load_checks(self) -> Callable[[Work], None]:
        """Imports the checks, and torch with them."""
        grade: Callable[[Work], None] = import_module(f"{PACKAGE}.{self.id}.checks").grade
        return grade
