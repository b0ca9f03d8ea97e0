"""The tasks by name. Torch-free."""

from __future__ import annotations

import difflib

from meshwright.errors import ConfigError
from meshwright.rl.tasks.arithmetic import ARITHMETIC
from meshwright.rl.tasks.logic import LOGIC
from meshwright.rl.tasks.strings import STRINGS
from meshwright.rl.tasks.task import Task

TASKS = {task.name: task for task in (ARITHMETIC, STRINGS, LOGIC)}


def find_task(name: str) -> Task:
    """Raises ConfigError for a name that is not one of a task."""
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"rl.task = {name!r} is not a task",
        f"{suggestion}expected {', '.join(TASKS)}, or prompts of your own: --source MODULE:NAME",
    )
