"""Every script describes itself with --help: it runs nothing, and a package that is not installed is no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = (path for folder in ("benchmarks", "docs", "fuzz") for path in sorted((ROOT / folder).rglob("*.py")))
SCRIPTS = [path.relative_to(ROOT) for path in FOUND if 'if __name__ == "__main__":' in path.read_text()]
LIGHT = [path for path in SCRIPTS if path.parts[0] == "docs" and path.name != "write_model_table.py"]
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv, text = [name, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            if name.startswith("docs/"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name.removesuffix(".py").replace("/", "."), run_name="__main__")
    except SystemExit as ended:
        if not ended.code and text.getvalue().startswith("usage: "):
            continue
    raise SystemExit(f"{name} --help does not end with its usage")
"""
WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "zstandard", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""


def run(*args: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=230, check=False
    )


def test_scripts_that_write_pages_describe_themselves():
    assert len(LIGHT) >= 7
    done = run("-c", HELP, *map(str, LIGHT))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_every_script_describes_itself():
    done = run("-c", HELP, *(str(path) for path in SCRIPTS if path not in LIGHT))
    if "is not installed; try pip" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


def test_help_of_the_benchmarks_needs_no_package_of_others(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    done = run("-m", "benchmarks", "--help", path=tmp_path)
    assert done.stdout.startswith("usage: python -m benchmarks ")
    part = run("-m", "benchmarks", "gpu", "--help", path=tmp_path)
    assert part.returncode == 1
    assert part.stderr == "the package torch is not installed; try pip install -e '.[train,test,bench]'\n"
