"""Writes docs/api.md, the reference of the public Python API, from signatures and docstrings, without torch."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import meshwright

MODULES = {"callbacks": "meshwright/callbacks.py", "errors": "meshwright/errors.py", "testing": "meshwright/testing.py"}
"""Public modules -> their file."""
ROOT = Path(__file__).parents[1]
INTRODUCTION = """\
# Python reference

Look up the public names of the package here: what `import meshwright` offers. The page is written by
`python docs/write_api_reference.py` from the source. Names are imported on first use, so that `import meshwright`
does not import torch.

"""
Definition = ast.FunctionDef | ast.ClassDef


def api_reference() -> str:
    """Returns the text of docs/api.md."""
    names = [name for name in meshwright.__all__ if not name.startswith("_") and name not in MODULES]
    functions = sorted(name for name in names if name.islower())
    classes = sorted(name for name in names if not name.islower())
    parts = [INTRODUCTION + summary()]
    parts += ["## Functions", *(describe(name, *find(meshwright._MODULES[name], name)) for name in functions)]
    parts += ["## Classes", *(describe(name, *find(meshwright._MODULES[name], name)) for name in classes)]
    for module, path in MODULES.items():
        parts += [f"## `meshwright.{module}`", *public_names(module, path)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def summary() -> str:
    """The list of the public names in the docstring of the package."""
    rows = [line[2:].partition(": ") for line in (meshwright.__doc__ or "").splitlines() if line.startswith("- ")]
    return "\n".join(
        ["| name | purpose |", "|---|---|", *(f"| `meshwright.{name}` | {text} |" for name, _, text in rows)]
    )


def find(module: str, name: str) -> tuple[Definition, str]:
    """The definition of a name and its module, through the imports of the module; nothing is imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    body = ast.parse(Path(spec.origin).read_text()).body
    lazy = [node for each in body if isinstance(each, ast.If) for node in each.body]  # imports under TYPE_CHECKING
    for node in (*body, *lazy):
        if isinstance(node, Definition) and node.name == name:
            return node, module
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any((alias.asname or alias.name) == name for alias in node.names)
        ):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return find(node.module, original)
    raise LookupError(f"{module} does not define {name}")


def public_names(module: str, path: str) -> Iterator[str]:
    """The docstring of a public module, and its names."""
    tree = ast.parse((ROOT / path).read_text())
    yield doc_text(ast.get_docstring(tree) or "")
    imported = [
        (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshwright.")
        for alias in node.names
    ]
    listed = exported(tree)
    for source, name in imported:
        if not listed or name in listed:
            yield describe(f"{module}.{name}", *find(source, name))
    for node in tree.body:
        kinds = ast.ClassDef if module == "errors" else Definition  # the functions there are for the package itself
        if isinstance(node, kinds) and not node.name.startswith("_") and (not listed or node.name in listed):
            yield describe(f"{module}.{node.name}", node, f"meshwright.{module}")


def exported(tree: ast.Module) -> list[str]:
    """The names in `__all__` of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def describe(name: str, node: Definition, module: str) -> str:
    """A heading, the signature, and the docstring of one definition."""
    doc = ast.get_docstring(node) or ""
    parts = [f"### `{name}`", f"*Defined in* `{module}`", f"```python\n{signature(node)}\n```", doc_text(doc)]
    if isinstance(node, ast.ClassDef):
        parts += [members(node)]
    return "\n\n".join(part for part in parts if part)


def signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    args = [ast.unparse(part) for part in argument_nodes(node.args)]
    text = f"def {node.name}({', '.join(args)})"
    if len(text) > 90:
        text = f"def {node.name}(\n" + "".join(f"    {arg},\n" for arg in args) + ")"
    return text + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def argument_nodes(args: ast.arguments) -> list[ast.AST]:
    """Each argument as code of its own: name, annotation, default."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [with_default(arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if args.vararg:
        found.append(ast.Name(f"*{ast.unparse(args.vararg)}"))
    elif args.kwonlyargs:
        found.append(ast.Name("*"))
    found += [with_default(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*found, *([ast.Name(f"**{ast.unparse(args.kwarg)}")] if args.kwarg else [])]


def with_default(arg: ast.arg, default: ast.expr | None) -> ast.AST:
    text = ast.unparse(arg)
    if default is not None:
        text += f" = {ast.unparse(default)}" if arg.annotation else f"={ast.unparse(default)}"
    return ast.Name(text)


def doc_text(doc: str) -> str:
    """A docstring as Markdown: `Args:` and its relatives become lists, and roles of Sphinx become code."""
    lines: list[str] = []
    section = ""
    for line in re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", inspect.cleandoc(doc)).replace("::\n", ":\n").splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Yields:"):
            section = line
            lines += [f"**{line[:-1]}**", ""]
        elif section and line.startswith("    "):
            first = section in ("Args:", "Raises:") or lines[-1] == ""
            name, colon, text = line.strip().partition(": ")
            if first and not line.startswith("     ") and (not lines[-1] or lines[-1].startswith(("- ", "  "))):
                lines.append(f"- `{name}`: {text}" if colon else f"- {line.strip()}")
            else:
                lines.append(f"  {line.strip()}")
        else:
            section = section and ("" if line else section)
            lines.append(line)
    return "\n".join(lines)


def members(node: ast.ClassDef) -> str:
    """The fields and the public methods of a class."""
    rows = []
    for index, item in enumerate(node.body):
        after = node.body[index + 1] if index + 1 < len(node.body) else None
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            rows.append((f"{item.target.id}: {ast.unparse(item.annotation)}", str(text)))
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            shown = (
                item.name
                if is_property(item)
                else f"{item.name}({', '.join(map(ast.unparse, argument_nodes(item.args)[1:]))})"
            )
            rows.append((shown, ast.get_docstring(item) or ""))
    if not rows:
        return ""
    lines = [f"| `{name.replace('|', chr(92) + '|')}` | {cell(text)} |" for name, text in rows]
    return "\n".join(["| member | meaning |", "|---|---|", *lines])


def is_property(item: ast.FunctionDef) -> bool:
    return any(
        isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in item.decorator_list
    )


def cell(text: str) -> str:
    """The first paragraph of a docstring in one line of a table."""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split()).replace("|", chr(92) + "|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (Path(__file__).parent / "api.md").write_text(api_reference())
