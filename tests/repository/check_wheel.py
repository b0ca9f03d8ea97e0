"""Builds the wheel, installs it into an empty virtual environment, and runs its commands outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from functools import partial
from pathlib import Path

from tests.repository import new_user_path

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "--version",
    "plan llama-8b --cluster h100:8 --html plan.html",
    "train --steps 2 --run run --model.layers=1",
    "report run",
    "watch run --once",
    "practice",
]
STATIC = ("meshwright/insight/watch/static", "practice/meshwright_practice/page/static")
"""The files of the live page and of the practice page."""


def run(*args: str | Path, cwd: Path) -> None:
    print("+", *args, flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(list(map(str, args)), cwd=cwd, env=environment, check=True, timeout=1200)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
        run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("meshwright-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "fuzz/"))], names
        assert "meshwright/py.typed" in names
        for folder_name in STATIC:
            found = (path for path in (ROOT / folder_name).rglob("*") if path.is_file())
            static = {path.relative_to(ROOT).as_posix() for path in found}
            assert static, f"{folder_name} is empty"
            assert not static - set(names), static - set(names)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        run(python, *pip, "install", "--constraint", ROOT / "constraints.txt", f"{wheel}[text]", cwd=folder)
        for command in COMMANDS:
            run(folder / "env" / "bin" / "meshwright", *command.split(), cwd=folder)
        new_user_path.follow(folder, folder / "env" / "bin" / "meshwright", partial(run, cwd=folder))
    print("the wheel works in an empty environment")


if __name__ == "__main__":
    main()
