"""Builds both wheels, installs them into empty virtual environments, and runs their commands outside the checkout.

Three environments: the package alone, which has no torch; with its extra `train`; and with the practice beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from functools import partial
from pathlib import Path

from tests.repository import new_user_path

ROOT = Path(__file__).parents[2]
SOURCES = {"meshwright": ROOT, "meshwright_practice": ROOT / "practice"}
"""Package -> the folder of its distribution."""
WITH_TORCH = ["--version", "train --steps 2 --run run --model.layers=1", "report run"]
WITHOUT_TORCH = [
    "--help",
    "plan llama-8b --cluster h100:8 --html plan.html",
    "report run",
    "watch run --once",
    "diagnose run",
    "checkpoint verify run",
]
MAX_BYTES = 120 << 20
"""What the package and its dependencies may take without torch."""
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def run(*args: str | Path, cwd: Path, fails: str = "") -> None:
    """Runs a command. If it must fail, it does so in one line that contains `fails`."""
    print("+", *args, flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    error = subprocess.PIPE if fails else None
    done = subprocess.run(list(map(str, args)), cwd=cwd, env=environment, timeout=1200, text=True, stderr=error)
    assert (done.returncode == 0) is not bool(fails), done
    assert not fails or (fails in done.stderr and done.stderr.count("\n") == 1), done.stderr


def build(package: str, folder: Path) -> Path:
    """Builds the wheel of a package, and checks that it has every file of the package and no others."""
    shutil.rmtree(SOURCES[package] / "build", ignore_errors=True)  # setuptools would add what an earlier build left
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", folder, SOURCES[package], cwd=folder)
    (wheel,) = folder.glob(f"{package}-*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = ["git", "ls-files", "--cached", "--others", "--exclude-standard", package]
    listed = subprocess.run(files, cwd=SOURCES[package], check=True, capture_output=True, text=True)
    expected = set(listed.stdout.splitlines())
    assert found == expected, sorted(found ^ expected)
    return wheel


def environment(folder: Path, *wheels: str | Path) -> Path:
    """Installs wheels into a new environment, and returns its folder of commands."""
    venv.create(folder, with_pip=True)
    commands = folder / "bin"
    run(commands / "python", *PIP, "install", "--constraint", ROOT / "constraints.txt", *wheels, cwd=folder)
    return commands


def installed_bytes(folder: Path) -> int:
    """The bytes of the packages of an environment, without what every environment has."""
    packages = next((folder / "lib").glob("python*/site-packages"))
    files = (path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files if not path.relative_to(packages).parts[0].startswith("pip"))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = partial(run, cwd=folder)
        wheel, practice = (build(package, folder) for package in SOURCES)
        commands = environment(folder / "train", f"{wheel}[train,text]")
        for command in WITH_TORCH:
            here(commands / "meshwright", *command.split())
        here(commands / "meshwright", "practice", fails="try pip install meshwright-practice")
        new_user_path.follow(folder, commands / "meshwright", here)
        # The same environment, as a user would add the practice to it.
        here(commands / "python", *PIP, "install", "--constraint", ROOT / "constraints.txt", practice)
        here(commands / "meshwright", "practice")

        commands = environment(folder / "plain", wheel)
        for command in WITHOUT_TORCH:
            here(commands / "meshwright", *command.split())
        here(commands / "meshwright", "train", fails="try pip install 'meshwright[train]'")
        size = installed_bytes(folder / "plain")
        assert size <= MAX_BYTES, f"{size} bytes without torch"
    print(f"the wheels work in empty environments; without torch, the package takes {size / (1 << 20):.0f} MiB")


if __name__ == "__main__":
    main()
