"""The structure of the repository: small files, small packages, unique class names, no import cycles, no torch where
it is promised, and a quick command line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import meshwright

ROOT = Path(__file__).parents[2]
FOLDERS = ("meshwright", "practice", "tests", "benchmarks", "fuzz", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("meshwright", "practice")]
MAX_LINES = 800
MAX_MODULES = 16
TORCH_FREE_IMPORTS = [
    "base.cli",
    "planner.cli",
    "insight.cli.watch",
    "core.recover",
    "core.api",
    "core.launch.fork_server",
]


def test_no_file_has_more_than_800_lines():
    assert FILES
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_every_file_starts_with_a_docstring():
    texts = {str(path): path.read_text() for path in FILES}
    assert not [path for path, text in texts.items() if text and not re.match(r'(#.*\n)*r?"""\s*[^\s"]', text)]


def test_no_file_has_a_vague_name():
    assert not [p.name for p in FILES if re.search(r"util|helper|misc|common|manager", p.name)]


def test_no_package_has_more_than_16_modules():
    modules = Counter(path.parent for path in PACKAGE if path.name != "__init__.py")
    large = {str(p.relative_to(ROOT)): n for p, n in modules.items() if n > MAX_MODULES}
    assert not large


@pytest.fixture(scope="module")
def statements():
    """The imports and classes at the top of every module, which is parsed once; bodies would take half a gigabyte."""
    found = {}
    for path in PACKAGE:
        kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
        found[path] = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
        for node in found[path]:
            if isinstance(node, ast.ClassDef):
                node.body = []
    return found


def test_class_names_are_unique_in_the_package(statements):
    nodes = (node for found in statements.values() for node in found)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert names
    assert not [name for name, count in names.items() if count > 1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "practice" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_modules_have_no_import_cycles(statements):
    """Imports inside functions and under TYPE_CHECKING do not count: they do not run at import time."""
    known = {module_name(path) for path in PACKAGE}
    graph: dict[str, set[str]] = {}
    for path in PACKAGE:
        imported = graph.setdefault(module_name(path), set())
        for node in statements[path]:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    imported.add(name if (name := f"{node.module}.{alias.name}") in known else node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
        imported &= known
        imported.discard(module_name(path))
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of the cycle


def test_help_imports_few_modules_and_not_torch():
    """What `--help` takes is the time of its imports."""
    code = (
        "import sys; from meshwright.base.cli import main; main(['--help'])\n"
        "assert 'torch' not in sys.modules\n"
        "assert len(sys.modules) < 250, len(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_torch_free_packages_do_not_import_torch():
    modules = ", ".join(f"meshwright.{name}" for name in TORCH_FREE_IMPORTS)
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)


def test_supervising_process_never_imports_torch(tmp_path):
    code = (
        "import sys; from meshwright.base.cli import main\n"
        f"main(['train', '--steps', '1', '--run', {str(tmp_path / 'r')!r}, '--model.layers=1'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("name", ["train", "plan", "simulate", "prove", "RunConfig", "ParallelSpec"])
def test_public_api_lists_and_documents(name):
    assert name in dir(meshwright)
    assert name in meshwright.__all__
    assert getattr(meshwright, name).__doc__


def test_public_functions_have_real_signatures():
    import inspect

    for name in ("train", "plan", "simulate", "prove"):
        function = getattr(meshwright, name)
        assert inspect.isfunction(function)
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert meshwright.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
