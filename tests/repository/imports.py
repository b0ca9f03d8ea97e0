"""The imports between the areas, and the lines that an import reads: `python -m tests.repository.imports [-v]`.

An import counts as eager if it runs when its module is imported, and as lazy if it stands in a function or names a
module in a string (a registry, `python -m`). Imports under TYPE_CHECKING count as eager for the order of the areas,
since a reader follows them, and not for what an import reads.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "base": set(),
    "core": {"base"},
    "planner": {"base"},
    "insight": {"base"},
    "prover": {"base", "core", "planner"},
    "rl": {"base", "core"},
    "ops": {"base", "core"},
}
"""Area -> the areas that it may import besides itself."""

CLOSURES = {
    "the trainer's loop": ["meshwright.core.trainer.loop"],
    "the supervisor": ["meshwright.core.recover.supervisor"],
    "saver and restore": ["meshwright.core.checkpoint.saver", "meshwright.core.checkpoint.restore"],
    "the stream": ["meshwright.core.data.stream"],
    "diagnose of a trace": ["meshwright.insight.diagnose.trace.diagnose"],
}
"""What a reader wants to know -> the modules that he opens first."""


class Import(NamedTuple):
    """One module of ours in another one. Kind: T at the top, L in a function, Y for types alone, S in a string."""

    importer: str
    imported: str
    kind: str
    line: int


@cache
def module_paths() -> dict[str, Path]:
    """Every module of the package by name."""
    paths = {}
    for path in sorted((ROOT / "meshwright").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """What a module imports of the package."""
    modules = module_paths()

    def visit(node: ast.AST, kind: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(module, a.name, kind, child.lineno) for a in child.names if a.name in modules)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    if full in modules or child.module in modules:
                        yield Import(module, full if full in modules else str(child.module), kind, child.lineno)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str) and "." in child.value:
                if child.value in modules:
                    yield Import(module, child.value, "S", child.lineno)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child, "L" if kind == "T" else kind)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, "Y")
            else:
                yield from visit(child, kind)

    return tuple(visit(ast.parse(modules[module].read_text()), "T"))


def closure(roots: list[str], kinds: str) -> set[str]:
    """The modules that are read when the roots are imported, with their packages."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += [entry.imported for entry in imports_of(module) if entry.kind in kinds]
        waiting += [module.rpartition(".")[0]] if "." in module else []
    return found


def lines(modules: set[str]) -> int:
    return sum(module_paths()[module].read_text().count("\n") for module in modules)


def area(module: str) -> str:
    """The area of a module; modules of no area (`meshwright.errors`) belong to base."""
    name = f"{module}.".split(".")[1]
    return name if name in MAY_IMPORT else "base"


def forbidden_imports() -> list[Import]:
    """Imports against the order of the areas. The public names of the package itself are found in every area."""
    return [
        entry
        for module in module_paths()
        if module not in ("meshwright", "meshwright.callbacks", "meshwright.testing")
        for entry in imports_of(module)
        if area(entry.imported) not in MAY_IMPORT[area(module)] | {area(module)}
    ]


def main() -> None:
    sizes: dict[str, set[str]] = {}
    for module in module_paths():
        sizes.setdefault(area(module), set()).add(module)
    print(f"{'area':<20} {'modules':>8} {'lines':>8}")
    for name, modules in sorted(sizes.items()):
        print(f"{name:<20} {len(modules):8,} {lines(modules):8,}")
    print(f"\n{'imported by':<20} {'modules':>8} {'lines':>8} {'with lazy imports':>18}")
    for name, roots in CLOSURES.items():
        eager = closure(roots, "T")
        print(f"{name:<20} {len(eager):8,} {lines(eager):8,} {lines(closure(roots, 'TLS')):18,}")
    found = forbidden_imports()
    print(f"\nimports against the order of the areas: {len(found)}")
    for (importer, imported), count in Counter((area(e.importer), area(e.imported)) for e in found).most_common():
        print(f"{importer:>9} -> {imported:<9} {count:4}")
        if "-v" in sys.argv:
            for entry in found:
                if (area(entry.importer), area(entry.imported)) == (importer, imported):
                    print(f"    {entry.kind} {entry.importer}:{entry.line} -> {entry.imported}")


if __name__ == "__main__":
    main()
