"""Entry points: imports the objects that a user names on the command line as MODULE:NAME. Torch-free.

An entry point is imported only if it was typed in this command. Run files and run folders may come from a stranger, so
what they record is never imported.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.base.config.constraints import ENTRY_POINT
from meshwright.base.environment import user_folders
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError, describe_exception, user_location


def load_user_code(entry_points: Mapping[str, str]) -> UserCode:
    """Imports the entry points of a command line: argument -> MODULE:NAME. A reduction is a word, not an object."""
    values: dict[str, Any] = {
        argument: text if argument == "reduction" else load_entry_point(argument, text)
        for argument, text in entry_points.items()
    }
    for argument in ("loss", "collate", "reward"):
        if isinstance(value := values.get(argument), type):
            values[argument] = call_without_arguments(value, argument)
    return UserCode(**values, entry_points=dict(entry_points))


def load_entry_point(argument: str, text: str) -> Any:
    """Imports MODULE and returns its attribute NAME. Modules of the current folder are found after all others."""
    option = f"--{argument.replace('_', '-')} {text}"
    path, _, attribute = text.partition(":")
    if "/" in path or path.endswith(".py"):
        file = Path(path)
        folder = f" in the folder {file.parent}, or with PYTHONPATH={file.parent}" if "/" in path else ""
        raise ConfigError(
            f"{option} is the path of a file",
            f"try --{argument.replace('_', '-')} {file.name.removesuffix('.py')}:{attribute or 'NAME'}{folder}",
        )
    if not ENTRY_POINT.fullmatch(text):
        raise ConfigError(f"{option} is not an entry point", "expected MODULE:NAME, such as my_project.models:build")
    module_name, _, name = text.partition(":")
    try:
        value: Any = import_user_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{option}: the import of {module_name} raised {describe_user_error(error)}",
            describe_name_clash(module_name)
            or f"expected a module that Python can import from {Path.cwd()} or PYTHONPATH",
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, dir(value), n=1)
            suggestion = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"{option}: {module_name} has no attribute {name}",
                describe_name_clash(module_name) or f"{suggestion}expected a name of that module",
            )
        value = getattr(value, part)
    return value


def import_user_module(name: str) -> ModuleType:
    """Imports a module of the user's. His folders are the last ones that Python searches, so that no file in them
    replaces a module of Python or of a package. They stay there if the module is in one of them: its functions may
    import others when they are called.
    """
    added = [folder for folder in user_folders() if folder not in sys.path]
    sys.path += added
    file = ""
    try:
        module = importlib.import_module(name)
        file = getattr(module, "__file__", None) or ""
        return module
    finally:
        if not file.startswith(tuple(os.path.join(folder, "") for folder in added)):
            sys.path[:] = [folder for folder in sys.path if folder not in added]


def describe_name_clash(module_name: str) -> str:
    """What to try if a module of the user has the name of one that Python finds first; else an empty string."""
    first = module_name.partition(".")[0]
    file = getattr(sys.modules.get(first), "__file__", None) or ""
    for folder in user_folders():
        for path in (Path(folder, f"{first}.py"), Path(folder, first, "__init__.py")):
            if os.path.exists(file) and path.exists() and not path.samefile(file):
                return f"try another name for {path}: Python finds {file} first"
    return ""


def call_without_arguments(function: Any, argument: str) -> Any:
    """Calls a user's function that builds a model, a loss or a dataset; an exception in it is a ConfigError."""
    try:
        return function()
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ConfigError(
            f"the {argument} cannot be built: {name}() raised {describe_user_error(error)}",
            f"expected a {argument}, or a callable without arguments that returns it",
        ) from error


def open_callbacks(user: UserCode) -> tuple[Any, ...]:
    """The user's callbacks: one, a sequence, or what a callable without arguments returns, such as a class."""
    value = user.callbacks
    if callable(value):
        value = call_without_arguments(value, "callbacks")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def describe_user_error(error: BaseException) -> str:
    """An exception in a user's code in one line: its class, its text, and the line of the user's file."""
    where = user_location(error)
    text = " ".join(describe_exception(error).split())
    return f"{type(error).__name__}: {text}" + (f" ({where})" if where else "")
