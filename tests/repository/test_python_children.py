"""Every Python that the packages start is started with -P: no file of the current folder is taken for a module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for package in ("meshwright", "practice") for path in sorted((ROOT / package).rglob("*.py"))]
START = re.compile(r"python\S* +-\S*[mc]\b", re.IGNORECASE)
TYPED = re.compile(r"python -m (?:meshwright(?: [a-z]|`|$)|pip)")
"""Commands that a user types have Python's own rules."""


def starts_without_p(source: str) -> list[int]:
    """The lines of commands, as lists or as text, that run a module or code without -P."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            parts = node.args if isinstance(node, ast.Call) else node.elts
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            is_shell = texts[:1] in (["sh"], ["bash"])
            if {"-m", "-c"} & set(texts) and "-P" not in texts and not is_shell:
                found.append(node.lineno)
            if "sys.executable" in [ast.unparse(part) for part in parts] and "-P" not in texts:
                found.append(node.lineno)
        is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if is_text and START.search(TYPED.sub("", ast.unparse(node))):
            found.append(node.lineno)
    return found


def test_packages_start_python_with_the_option_p():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in starts_without_p(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "start([sys.executable, '-m', 'a'])",
        "start([sys.executable, script])",
        "run(sys.executable, script)",
        "command = [python, '-c', code]",
        "text = 'python3 -m a'",
        "text = '\"$python\" -m a.b'",
        "text = f'{python} -m a.b'",
    ],
)
def test_start_without_the_option_p_is_found(source):
    assert starts_without_p(source)
