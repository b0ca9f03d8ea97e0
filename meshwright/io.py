"""Files of strangers, opened only where they are plain files: a pipe would wait for ever, a device never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from meshwright.errors import ConfigError


def open_plain(path: Path) -> BinaryIO:
    """An OSError where it is anything else."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return file


def read_plain(path: Path, most: int, what: str, allowed: str) -> bytes:
    """All of it, where that is no more than `most` bytes; else one line that says what it should be."""
    try:
        with open_plain(path) as file:
            text = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}", f"allowed: {allowed}") from None
    if len(text) > most:
        raise ConfigError(f"{what} is over {most:,} bytes", f"allowed: {allowed}")
    return text
