"""A folder with a file for every module of Python and of the installed packages; each notes that it was imported."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

NOTES = "imported.txt"


def fill_hostile_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    code = f"with open({str(folder / NOTES)!r}, 'a') as notes:\n    notes.write(__name__ + ' ')\n"
    for name in {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(code)
    return folder


def imported(folder: Path) -> str:
    """The names of the modules that were imported from the folder."""
    notes = folder / NOTES
    return notes.read_text() if notes.exists() else ""
