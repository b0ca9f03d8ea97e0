"""Reads the user's notebook or script without running it: its code, its functions, and where each line comes from."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.base.io import parse_json, printable, read_regular_file
from meshwright.errors import ConfigError
from meshwright_practice.interview.exercise import CONTRACT, ContractFunction

MAX_BYTES = 4 << 20
EXPECTED = "a Python script (.py) or a Jupyter notebook (.ipynb) of format 4"
MAGIC = re.compile(r"^(\s*)(?:(\w+)\s*=\s*)?(?:[%!?]|[\w.]+\?{1,2}\s*$)")
KEEP_CELL = ("%%time", "%%timeit", "%%capture")
"""Cell magics whose cell is ordinary Python."""


@dataclass(frozen=True)
class Submission:
    """The code of a file. `places` has one entry per line, such as "cell 3, line 2"."""

    path: Path
    source: str
    places: tuple[str, ...]
    remarks: tuple[str, ...]
    """what was skipped, for the user to know"""
    functions: dict[str, tuple[str, ...] | None]
    """name at the top level -> names of its positional parameters, or None where they cannot be read"""

    def place(self, line: int) -> str:
        """Where a line of `source` is in the user's file, with its text."""
        if not 1 <= line <= len(self.places):
            return self.path.name
        text = self.source.splitlines()[line - 1].strip()
        return printable(f"{self.path.name}, {self.places[line - 1]}: {text[:80]}")

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """What to add: a sentence for every function of the contract that is missing or takes other parameters."""
        sentences = []
        for name in names:
            function = CONTRACT[name]
            if name not in self.functions:
                sentences.append(f"add def {function.signature}: {function.meaning}")
            elif (found := self.functions[name]) is not None and not accepts(found, function):
                sentences.append(f"{name} takes ({', '.join(found)}); expected {function.signature}")
        return sentences


def accepts(found: tuple[str, ...], function: ContractFunction) -> bool:
    """Whether a function can be called with the contract's arguments by position; see `parameter_names`."""
    positional = [name for name in found if "*" not in name]
    required = [name for name in positional if not name.endswith("=")]
    wanted, takes_more = len(function.parameters), "*" in found
    needs_keyword = any(name.endswith("*") and name != "*" for name in found)
    return not needs_keyword and len(required) <= wanted and (len(positional) >= wanted or takes_more)


def read_submission(path: Path) -> Submission:
    """Reads a .py or .ipynb file; raises ConfigError if it is neither, or has a syntax error."""
    content = read_regular_file(path, MAX_BYTES, str(path), EXPECTED)
    if path.suffix == ".ipynb":
        cells, remarks = notebook_cells(parse_json(content, str(path), EXPECTED), path)
    elif path.suffix == ".py":
        try:
            cells, remarks = [("", content.decode("utf-8-sig"))], []
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not text in UTF-8", f"expected {EXPECTED}") from None
    else:
        raise ConfigError(f"{path} is neither a script nor a notebook", f"expected {EXPECTED}")
    lines: list[str] = []
    places: list[str] = []
    for label, text in cells:
        kept, said = python_lines(text, label) if label else (text.splitlines(), [])
        remarks += said
        lines += kept
        places += [f"{label}line {number}" for number in range(1, len(kept) + 1)]
    source = "\n".join(lines) + "\n"
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 0
        place = places[line - 1] if 1 <= line <= len(places) else "the file"
        reason = getattr(error, "msg", "") or str(error) or type(error).__name__
        raise ConfigError(f"{path}, {place}: {reason}", "expected valid Python") from None
    return Submission(path, source, tuple(places), tuple(remarks), top_level_functions(tree))


def notebook_cells(value: Any, path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The code cells of a parsed notebook as (label, text)."""
    cells = value.get("cells") if isinstance(value, dict) else None
    if not isinstance(cells, list) or value.get("nbformat") != 4:
        raise ConfigError(f"{path} is not a notebook of format 4", f"expected {EXPECTED}")
    found: list[tuple[str, str]] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if not isinstance(source, str):
            raise ConfigError(f"{path}, cell {number} has no source", f"expected {EXPECTED}")
        found.append((f"cell {number}, ", source))
    if not found:
        raise ConfigError(f"{path} has no code cell", "expected at least one")
    return found, []


def python_lines(text: str, label: str) -> tuple[list[str], list[str]]:
    """The lines of a cell, in which magics and shell commands are replaced with `pass`, and remarks that say so."""
    lines = text.splitlines()
    try:
        ast.parse(text)
        return lines, []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(KEEP_CELL):
        return ["pass"] * len(lines), [f"{label.strip(', ')} is skipped: it starts with {printable(first)[:40]}"]
    kept, remarks = [], []
    for number, line in enumerate(lines, 1):
        match = MAGIC.match(line)
        if match is None:
            kept.append(line)
            continue
        kept.append(f"{match[1]}{match[2]} = None" if match[2] else f"{match[1]}pass")
        remarks.append(f"{label}line {number} is skipped: {printable(line.strip())[:60]}")
    return kept, remarks


def top_level_functions(tree: ast.Module) -> dict[str, tuple[str, ...] | None]:
    """Names that the file defines at its top level, also inside `if`, `try` and `with`; the last one counts."""
    found: dict[str, tuple[str, ...] | None] = {}
    statements: list[ast.AST] = list(reversed(tree.body))
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameter_names(node.args)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name): None for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            statements += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
    return found


def parameter_names(args: ast.arguments) -> tuple[str, ...]:
    """Positional parameters; one with a default ends with "=", a required keyword with "*", and "*" is *args."""
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    optional = len(args.defaults)
    marked = [name + ("=" if index >= len(names) - optional else "") for index, name in enumerate(names)]
    required_keywords = [
        f"{arg.arg}*" for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if not default
    ]
    return (*marked, *(["*"] if args.vararg else []), *required_keywords)
