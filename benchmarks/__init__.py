"""Benchmarks: the cost of Meshwright relative to its peers, measured in the same run on the same machine."""

from __future__ import annotations

import sys
from types import TracebackType


def report_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """One line for a package of others that is not installed."""
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, traceback)
    print(f"the package {error.name} is not installed; try pip install -e '.[train,test,bench]'", file=sys.stderr)


if sys.argv[0] == "-m":  # python -m benchmarks...
    sys.excepthook = report_exception
