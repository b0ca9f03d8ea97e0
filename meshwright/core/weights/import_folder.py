"""Imports a folder of weights into a new run folder, which can then be moved with its weights. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.base.config.data import TOKENIZER_FILE
from meshwright.base.io import atomic_write, file_inside
from meshwright.base.records.run_folder import INITIAL, RunFolder
from meshwright.core.weights.export import temporary_folder
from meshwright.core.weights.folder import CONFIG_FILE, INDEX_FILE, RECORD_FILE, WeightFiles
from meshwright.core.weights.huggingface_files import COMPANIONS, GENERATION_FILE, copy_file
from meshwright.core.weights.mapping import checked_digest, find_parameters
from meshwright.errors import ConfigError

COPIED = (INDEX_FILE, CONFIG_FILE, GENERATION_FILE, RECORD_FILE, TOKENIZER_FILE, *COMPANIONS)


@dataclass(frozen=True)
class Import:
    """What was imported."""

    folder: Path
    """the run folder"""
    tensors: int
    bytes: int
    digest: str


def import_folder(source: Path, run: Path) -> Import:
    """Verifies a folder of a Hugging Face model, copies it to RUN/initial, and writes the run file of the new run."""
    files = WeightFiles.open(source)
    stored = find_parameters(files, None, None)
    folder = RunFolder(run.absolute())
    folder.require_usable()
    if folder.has_run or folder.run_file.exists() or (folder.root / INITIAL).exists():
        raise ConfigError(f"{run} already has a run", "expected --run DIR with a new folder")
    digest = checked_digest(files, stored)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{run} cannot be written: {error.strerror}", "try another --run DIR") from None
    with temporary_folder(folder.root / INITIAL) as target:
        for name in (*COPIED, *sorted({tensor.file.name for tensor in files.tensors.values()})):
            copy_file(file_inside(files.root, name), target)
        copied = WeightFiles.open(target)
        if checked_digest(copied, stored) != digest:
            raise ConfigError(f"{files.root} changed while it was copied", "try again when nothing writes to it")
    atomic_write(folder.run_file, f'init_from = "{INITIAL}"\n')
    return Import(run, len(files.tensors), sum(tensor.bytes for tensor in files.tensors.values()), digest)
