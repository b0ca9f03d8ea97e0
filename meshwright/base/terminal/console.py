"""The rich Console that every view prints to. Torch-free."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

MIN_WIDTH = 40
"""The narrowest terminal that views are laid out for; on a narrower one, or one of unknown width, lines wrap."""


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """Returns a console for `file`, standard output by default, that is at least MIN_WIDTH columns wide.

    The environment may give a width of zero (COLUMNS=0), for which rich cannot lay out a table.
    """
    console = Console(file=file, width=width, highlight=False)
    if console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    return console
