"""A user's file while it is graded: calls its functions, on ranks where needed, and reports checks.

A mistake of the user becomes a failed check that names the rank and the line. It ends the grading where later checks
depend on it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from meshwright.errors import cut_text, short_path
from meshwright_practice.checks import Check
from meshwright_practice.labs.lab import FILE_CHECK, Lab
from meshwright_practice.labs.rank_runs import run_user_ranks
from meshwright_practice.labs.stacks import user_lines
from meshwright_practice.labs.user_error import UserError

MAX_TEXT = 600
"""Characters of one text of a check."""
MODULE = "practice_lab"


class GradingEnded(Exception):
    """The last reported check has failed, and the checks after it depend on it."""


class Work:
    """The work of a user. `hang_seconds` is how long ranks may take before their lines are reported.

    Args:
        lab: the lab that is graded.
        source: the text of the user's file.
        path: where the text comes from, for messages.
        report: receives every check.
    """

    def __init__(
        self, lab: Lab, source: str, path: Path, report: Callable[[Check], None], hang_seconds: float = 8.0
    ) -> None:
        self.lab, self.source, self.path = lab, source, path
        self.hang_seconds = hang_seconds
        self.module = ModuleType(MODULE)
        self._report = report
        self._passed: set[str] = set()

    def check(self, name: str, passed: bool, expected: object, found: object, message: str) -> None:
        """Reports a check; `message` says what to look at, and is kept only if the check failed."""
        texts = (cut_text(str(text), MAX_TEXT) for text in (expected, found, "" if passed else message))
        self._report(Check(name, bool(passed), *texts))
        if passed:
            self._passed.add(name)

    def passed(self, name: str) -> bool:
        """Whether a check has been reported as passed."""
        return name in self._passed

    def require(self, name: str, passed: bool, expected: object, found: object, message: str) -> None:
        """Reports a check on which all later checks depend."""
        if not passed:
            self.stop(name, expected, found, message)
        self.check(name, True, expected, found, message)

    def stop(self, name: str, expected: object, found: object, message: str) -> NoReturn:
        """Reports a failed check and ends the grading."""
        self.check(name, False, expected, found, message)
        raise GradingEnded

    def load(self) -> None:
        """Runs the file, and reports whether it defines the functions of the lab."""
        if self.lab.suffix == ".py":
            with self.user_code(FILE_CHECK):
                self._execute()
            for function in self.lab.functions:
                self._check_function(function.name, function.parameters, str(function))
        self.check(FILE_CHECK, True, "the file runs and defines the functions", "it does", "")

    def _execute(self) -> None:
        path = str(self.path)
        linecache.cache[path] = (len(self.source), None, self.source.splitlines(keepends=True), path)
        self.module.__file__ = path
        sys.modules[MODULE] = self.module
        sys.path.append(str(self.path.parent))  # for a module of the user's next to the file; it replaces no other
        exec(compile(self.source, path, "exec"), vars(self.module))

    def _check_function(self, name: str, parameters: tuple[str, ...], signature: str) -> None:
        function = getattr(self.module, name, None)
        if function is None or not callable(function):
            what = "has no function" if function is None else f"has a {type(function).__name__} instead of a function"
            found = f"{short_path(str(self.path))} {what} {name}"
            self.stop(FILE_CHECK, signature, found, f"define {name}, or start again with --reset")
        try:
            parameters_found = inspect.signature(function)
            parameters_found.bind(*parameters)
        except ValueError:  # a callable without a signature
            return
        except TypeError:
            hint = f"give {name} the parameters that the checks pass"
            self.stop(FILE_CHECK, signature, f"{name}{parameters_found}", hint)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Reports the check `name`: passed if the user's code inside ends, and failed if it raises."""
        with self.user_code(name):
            yield
        self.check(name, True, "the functions return", "they do", "")

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function of the user's returns; an exception is the failed check `name`."""
        with self.user_code(name):
            return function(*args)

    @contextmanager
    def user_code(self, name: str) -> Iterator[None]:
        """Reports a failed check `name` if the user's code inside raises."""
        pid = os.getpid()
        try:
            yield
        except GradingEnded:
            raise
        except SyntaxError as error:
            line = f"line {error.lineno}: {(error.text or '').strip()}"
            found = f"{type(error).__name__}: {error.msg} ({short_path(str(self.path))}, {line})"
            self.stop(name, "a file that Python can read", found, "correct this line")
        except BaseException as error:  # noqa: BLE001  whatever the user's code does is reported
            self.fail(name, UserError.from_exception(error, str(self.path)))
        finally:
            if os.getpid() != pid:  # the user's code has forked, and this is the copy
                os._exit(0)

    def ranks(self, name: str, function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        """Runs `function(world, *args)`, which calls the user's code, on `count` ranks; reports the check `name`."""
        run = run_user_ranks(function, count, args, str(self.path), self.hang_seconds)
        if run.error is not None:
            self.fail(name, run.error, run.failed_rank)
        if run.stacks is not None:
            waiting = user_lines(run.stacks, str(self.path), self.source)
            self.stop(
                name,
                f"every rank returns within {self.hang_seconds:g} s",
                f"a hang: {waiting}",
                "every receive needs a send of another rank, in the same order, and a blocking send waits for its "
                "receive: follow one message from the line where its rank waits",
            )
        if run.ended:
            self.stop(name, f"{count} ranks return", run.ended, run.hint)
        self.check(name, True, f"{count} ranks return", "they do", "")
        return run.values

    def fail(self, name: str, error: UserError, rank: int | None = None) -> None:
        """Reports an exception of the user's code and ends the grading."""
        where = f"{short_path(str(self.path))}, line {error.line}"
        on_rank = "" if rank is None else f"rank {rank}: "
        if error.kind == error.text == "NotImplementedError":
            function = self._function_at(error.line)
            purpose = next((f": {f.purpose}" for f in self.lab.functions if f.name == function), "")
            self.stop(
                name,
                f"{function} is written{purpose}",
                f"{function} raises NotImplementedError ({where})",
                f"write {function} next; --hint gives a hint",
            )
        if not error.line:
            returns = "; ".join(map(str, self.lab.functions))
            found = f"{on_rank}the checks fail with {error.kind}: {' '.join(error.text.split())}"
            self.stop(name, returns, found, "compare what your functions return with their signatures")
        message = {
            "SystemExit": "remove the call that ends the process: the checks call your functions and go on",
            "KeyboardInterrupt": "remove the line that raises KeyboardInterrupt",
            "MemoryError": "the lab needs a few megabytes: look for a tensor that grows",
        }.get(error.kind, "look at this line: the exception comes from it, or from what it calls")
        found = f"{on_rank}{error.kind}: {' '.join(error.text.split())} ({where})"
        self.stop(name, "no exception", found, message)

    def _function_at(self, line: int) -> str:
        """The name of the function that a line of the user's file belongs to."""
        nodes = (node for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.FunctionDef))
        inside = [node for node in nodes if node.lineno <= line <= (node.end_lineno or line)]
        return max(inside, key=lambda node: node.lineno).name if inside else "a function"
