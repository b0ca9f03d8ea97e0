"""Every private name of torch that the package uses is in meshwright/core/torch_private.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from meshwright.core import torch_private

PACKAGE = Path(__file__).parents[2] / "meshwright"
HOME = PACKAGE / "core" / "torch_private.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != HOME)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; '' if it does not start at a name."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_torch_names(source: str) -> list[str]:
    """Private modules and attributes of torch that a source imports, reads by an attribute chain or by getattr."""
    tree, names, modules = ast.parse(source), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    names += [alias.name] if is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = full
                names += [full] if is_private(full) else []
    for node in ast.walk(tree):
        chain = dotted(node)
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                chain = f"{dotted(node.args[0])}.{attribute.value}"
        root, _, rest = chain.partition(".")
        if root in modules and rest and is_private(rest):
            names.append(f"{modules[root]}.{rest}")
    return sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_in_torch_private(path):
    assert private_torch_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._x()", ["torch._C", "torch._C._x"]),
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("from torch.distributed import _resolve", ["torch.distributed._resolve"]),
        ("import torch\ntorch.ops.aten._flash(1)", ["torch.ops.aten._flash"]),
        ("import torch\ngetattr(torch, '_grouped_mm', None)", ["torch._grouped_mm"]),
        ("import torch.nn.functional as F\nF._x", ["torch.nn.functional._x"]),
        ("import logging\nlogging.getLogger('torch.distributed._shard')", []),
        ("class A:\n    def f(self):\n        return self._x", []),
        ("import torch\ntorch.Tensor.__torch_dispatch__", []),
    ],
)
def test_private_torch_names_are_found(source, names):
    assert private_torch_names(source) == names


def test_every_wrapper_of_waits_is_called_once(monkeypatch):
    """A forked process inherits the wrapper of its parent: its own one must be called, too."""
    functions = [(dist.Work, "wait"), (_functional_collectives, "wait_tensor"), (torch.cuda.Stream, "wait_event")]
    for owner, name in functions:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch_private, "_wrapped_waits", [])
    called = []

    def parent(wait, *args):
        called.append("parent")
        return wait(*args)

    def child(wait, *args):
        called.append("child")
        return wait(*args)

    for wrapper in (parent, parent, child):
        torch_private.wrap_collective_waits(wrapper)
    _functional_collectives.wait_tensor(torch.ones(1))
    assert called == ["child", "parent"]


def test_pythons_of_inductor_import_nothing_of_the_users_folders(tmp_path, monkeypatch):
    from torch._inductor import autotune_process, cpu_vec_isa, utils
    from torch._inductor.compile_worker import subproc_pool

    for module in (autotune_process, cpu_vec_isa, utils, subproc_pool):
        monkeypatch.setattr(module, "python_subprocess_env", utils.python_subprocess_env)
    for name in ("ctypes", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(1, b'ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def output() -> bytes:
        command = [sys.executable, "-c", "import ctypes"]
        return subprocess.run(
            command, env=cpu_vec_isa.python_subprocess_env(), stdout=subprocess.PIPE, timeout=60
        ).stdout

    assert b"ran" in output()
    torch_private.hide_user_folders_from_inductor([str(tmp_path)])
    assert output() == b""
