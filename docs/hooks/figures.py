"""Computes the figures of the documentation while the site is built.

A figure stands between two comments, so that the page can be read without the site:

    A rank sends <!-- call: wire("all_reduce", 4) -->1.5<!-- end --> times the message.
    It takes <!-- run: meshwright plan llama-8b --json => plan.seconds => seconds -->12.1 s<!-- end --> per step.

`run:` is a command of Meshwright that prints JSON, and the path of a value in it; `call:` is a function of
`formulas.py` with literal arguments; the last part is a format of `FORMATS`. A build replaces the text between the
comments, and fails if the command fails or if the page in the repository has another figure.
`python docs/write_figures.py` updates the pages.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import shlex
from functools import cache
from typing import Any

from formulas import FORMULAS

from meshwright.base.cli.main import dispatch
from meshwright.base.io import format_bytes, format_seconds

LOG = logging.getLogger("mkdocs.hooks.figures")
MARKER = re.compile(r"<!-- (run|call): (.+?) -->(.*?)<!-- end -->", re.DOTALL)
FORMATS = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "GB": lambda value: f"{value / 1e9:.3g} GB",
    "MB": lambda value: f"{value / 1e6:.3g} MB",
    "billions": lambda value: f"{value / 1e9:.3g} billion",
    "percent": lambda value: f"{value:.1%}",
    "integer": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.4g}",
    "text": str,
}


class FigureError(Exception):
    """A figure that cannot be computed, with its marker."""


@cache
def command_json(command: str) -> Any:
    """The JSON that a command of Meshwright prints. The command runs in this process, and must not need torch."""
    program, *args = shlex.split(command)
    if program != "meshwright":
        raise FigureError(f"{command!r} is not a command of meshwright")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        dispatch(args)
    return json.loads(printed.getvalue())


def lookup(value: Any, path: str) -> Any:
    """The value at a path such as plan.memory.optimizer or ladder.0.name."""
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def call_formula(text: str) -> Any:
    """Calls a function of FORMULAS; arguments are literals, so that a page cannot run anything else."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in FORMULAS:
        raise FigureError(f"{text!r} is not a call of one of {', '.join(FORMULAS)}")
    args = [ast.literal_eval(arg) for arg in call.args]
    return FORMULAS[call.func.id](*args, **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})


@cache
def figure(kind: str, source: str) -> str:
    """The text of a figure."""
    parts = [part.strip() for part in source.split(" => ")]
    style = parts.pop() if parts[-1] in FORMATS else ""
    try:
        value = lookup(command_json(parts[0]), parts[1]) if kind == "run" else call_formula(parts[0])
        if style:
            return str(FORMATS[style](value))
        return f"\n\n{value}\n\n" if isinstance(value, str) and value.startswith("|") else plain(value)
    except Exception as error:
        raise FigureError(f"figure {source!r} failed: {type(error).__name__}: {error}") from error


def plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def with_figures(markdown: str) -> str:
    """The page with every figure computed."""
    return MARKER.sub(lambda mark: f"<!-- {mark[1]}: {mark[2]} -->{figure(mark[1], mark[2])}<!-- end -->", markdown)


def on_page_markdown(markdown: str, page: Any, **_settings: Any) -> str:
    """Called by mkdocs for every page: a stale or failing figure is a warning, which ends a strict build."""
    try:
        computed = with_figures(markdown)
    except FigureError as error:
        LOG.warning("%s: %s", page.file.src_uri, error)
        return markdown
    if computed != markdown:
        LOG.warning("%s has stale figures; run python docs/write_figures.py", page.file.src_uri)
    return MARKER.sub(lambda mark: mark[3], computed)  # comments inside table cells would be shown as they are
