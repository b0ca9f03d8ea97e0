"""CONTRIBUTING.md names files, functions and packages that exist, and answers the questions of a newcomer."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
QUESTIONS = [
    "Where is a wrong gradient prevented?",
    "Where is the update of an optimizer?",
    "Where is a whole matrix gathered for Muon?",
    "Where does a checkpoint come into existence?",
    "What happens when rank 3 dies?",
    "How do I add my GPU?",
]
RECIPES = ["model family", "optimizer", "schedule", "GPU", "data source", "collective", "check"]
NOT_YET = {"meshwright/core/optim/NAME.py", "meshwright/base/models/NAME/", "meshwright/core/models/NAME.py"}


def paths() -> list[str]:
    found = re.findall(r"`((?:meshwright|practice|tests|docs|examples)/[A-Za-z0-9_/.]*)`", TEXT)
    return sorted({path for path in found if path not in NOT_YET})


@pytest.mark.parametrize("path", paths())
def test_contributing_names_existing_files(path):
    assert (ROOT / path).exists()


def defined(tree: ast.Module, name: str) -> bool:
    owner, _, member = name.rpartition(".")
    body = tree.body
    if owner:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return member in names


def test_contributing_names_existing_functions():
    named = re.findall(r"`(meshwright/[A-Za-z0-9_/]+\.py)`\s+\(`([A-Za-z_.]+)`\)", TEXT)
    assert len(named) >= 5
    missing = [(path, name) for path, name in named if not defined(ast.parse((ROOT / path).read_text()), name)]
    assert not missing


def test_contributing_names_existing_tables():
    named = re.findall(r"`([A-Z_]+|[A-Z][a-z]+Config)`\s+in\s+`(meshwright/[A-Za-z0-9_/]+\.py)`", TEXT)
    assert len(named) >= 4
    assert not [(name, path) for name, path in named if not re.search(rf"\b{name}\b", (ROOT / path).read_text())]


def test_contributing_answers_each_question():
    assert not [question for question in QUESTIONS if f"**{question}**" not in TEXT]
    assert not [recipe for recipe in RECIPES if not re.search(rf"^\*\*An? .*{recipe}\.\*\*", TEXT, re.MULTILINE)]


def test_contributing_lists_every_package():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = {
        f"{contract['containers'][0].replace('.', '/')}/{name.strip()}"
        for contract in contracts
        if contract.get("exhaustive")
        for layer in contract["layers"]
        for name in re.split("[|:]", layer)
    }
    assert len(listed) > 30
    assert not [p for p in listed if f"`{p}/`" not in TEXT and f"`{p}.py`" not in TEXT]
