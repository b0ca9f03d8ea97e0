"""The shell commands of a document, and how a test runs them as a reader would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
EXIT = re.compile(r"  # exits with (\d+)$")
"""What ends a command line that does not exit with 0."""

RUN_ELSEWHERE = {"make check", "make test", "make test-all", "make bench"}
"""Commands that CI runs itself, or that take too long inside a test; each must at least be a target of the Makefile."""


def commands(document: str) -> list[str]:
    """Returns every command line of the `sh` blocks of a document, in order, without comments but for the exit code."""
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ").rstrip() for block in blocks for line in block.splitlines()]
    lines = [line if EXIT.search(line) else line.split("  #")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def files(document: str) -> dict[str, str]:
    """Returns the files that a document asks its reader to write: name -> text of the block with that title."""
    blocks = re.findall(r'```[a-z]+ title="([\w.-]+)"\n(.*?)```', (ROOT / document).read_text(), re.DOTALL)
    return dict(blocks)


def recipe(target: str) -> list[str]:
    """Returns the first command of a target of the Makefile, as it is found in the virtual environment."""
    found = re.search(rf"^{target}:.*\n\t@?(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, target
    return shlex.split(found[1].replace("$(BIN)/", ""))


def run(command: str, folder: Path) -> None:
    """Runs one command in `folder` and asserts its exit code: 0, or the one that its comment says."""
    makefile = (ROOT / "Makefile").read_text()
    if command in RUN_ELSEWHERE:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)
        return
    expected = int(found[1]) if (found := EXIT.search(command)) else 0
    args = shlex.split(command, comments=True)
    environment = dict(os.environ)
    while re.match(r"[A-Z_]+=", args[0]):
        name, _, value = args.pop(0).partition("=")
        environment[name] = value
    if args[0] == "make":  # run the recipe itself: a test must not create a virtual environment
        args = recipe(args[1])
    scripts = Path(sys.executable).parent
    args[0] = str(scripts / args[0]) if (scripts / args[0]).exists() else args[0]
    done = subprocess.run(args, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == expected, done.stdout + done.stderr


def prepare(folder: Path, document: str = "README.md") -> Path:
    """Makes `folder` look like the root of a checkout to the commands of a document, with the files that it shows."""
    for name, text in files(document).items():
        (folder / name).write_text(text)
    for name in ("examples", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder
