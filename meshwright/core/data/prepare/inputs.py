"""Finds the input files of `data prepare` and their formats. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from itertools import takewhile
from pathlib import Path

from meshwright.base.io import is_inside, read_json
from meshwright.core.data.token_files import find_files
from meshwright.errors import ConfigError, DataError

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Suffix of a file -> its format, for `--format auto`."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LINE_FORMATS = ("text", "jsonl")


@dataclass(frozen=True)
class InputFile:
    """One file to tokenize."""

    path: Path
    format: str
    """text, jsonl, parquet, or arrow: a file of a dataset on disk"""
    compression: str = ""
    """gzip, zstd, or none; of text and JSONL only"""

    @property
    def row_name(self) -> str:
        return "line" if self.format in LINE_FORMATS else "row"


def find_inputs(inputs: Sequence[str], format: str = "auto") -> list[InputFile]:
    """The files of the inputs in their order; an input is a file, a folder, a glob pattern or a dataset on disk."""
    return [file for text in inputs for file in find_input(text, format)]


def find_input(text: str, format: str) -> Iterator[InputFile]:
    folder = Path(text)
    if format in ("auto", "datasets", "records") and (folder / "state.json").is_file():
        names = dataset_files(folder)
        require_inside(folder, [folder / "state.json", *(folder / name for name in names)])
        yield from (InputFile(folder / name, "arrow") for name in names)
        return
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ConfigError(f"{text} is a dataset with several splits", f"expected one of them: {', '.join(splits)}")
    if format == "datasets":
        raise ConfigError(
            f"{text} is not a dataset on disk: it has no state.json",
            "expected a folder that Dataset.save_to_disk has written",
        )
    files = find_files(text, "input")
    if not folder.is_file():  # a folder, or a pattern below the folder that is named before its first wildcard
        require_inside(Path(*takewhile(lambda part: not has_magic(part), folder.parts)), files)
    for file in files:
        yield InputFile(file, known_format(file, format), compression(file))


def require_inside(folder: Path, files: Sequence[Path]) -> None:
    """Raises ConfigError for links that lead out of a folder, which may come from somebody else: what they lead to is
    not part of it, such as a private file of the user.
    """
    outside = [file for file in files if not is_inside(folder, file)]
    if outside:
        raise ConfigError(
            f"{len(outside)} of {len(files)} files of {folder} are links that lead out of it, such as {outside[0]} to "
            f"{outside[0].resolve()}",
            "try to remove them, or name each such file as INPUT",
        )


def compression(file: Path) -> str:
    return COMPRESSIONS.get(file.suffix, "")


def known_format(file: Path, format: str) -> str:
    """The format of a file: the one that the user names, or that of its suffix. `records` excludes text."""
    suffix = Path(file.stem).suffix if compression(file) else file.suffix
    found = SUFFIXES.get(suffix.lower(), "")
    if format not in ("auto", "records"):
        found = format
    if not found or (format == "records" and found == "text"):
        known = "JSONL, Parquet or a dataset on disk" if format == "records" else "text, JSONL, Parquet or a dataset"
        raise ConfigError(f"the format of {file} is not known by its suffix", f"expected {known}, or try --format")
    if compression(file) and found not in LINE_FORMATS:
        raise ConfigError(f"{file} is compressed", f"expected a plain {found} file, which compresses its own columns")
    return found


def dataset_files(folder: Path) -> list[str]:
    """The Arrow files of a dataset that `save_to_disk` has written. Its state.json is untrusted."""
    state = read_json(folder / "state.json", "the state.json of a dataset on disk", follow=True)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names or not all(re.fullmatch(r"[\w.-]+\.arrow", name) for name in names):
            raise ValueError(f"its files are {names}")
        return names
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}/state.json does not list the files of a dataset: {error}",
            "expected a folder that Dataset.save_to_disk has written",
        ) from None
