"""A file that is written whole or not at all: beside its place first, then given its name. Torch-free."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from meshwright.errors import ConfigError


def write_whole(path: Path, lines: Iterable[str], word: str) -> None:
    """`word` is the option that named the file, for refusals."""
    try:
        path = path.resolve()  # the file that a link leads to, and not the link
    except (OSError, RuntimeError):
        raise ConfigError(f"{word} {path} leads nowhere", "allowed: a file in a folder that exists") from None
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ConfigError(f"{word} {path} cannot be written", "allowed: a file in a folder that exists")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(
            f"{word} {path} cannot be written: {error.strerror}", "allowed: a folder to write in"
        ) from None
    finally:
        with suppress(OSError):
            beside.unlink()
