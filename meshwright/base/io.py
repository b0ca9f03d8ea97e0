"""Reads untrusted files, writes files atomically, and formats numbers and text for people and for JSON."""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.errors import ConfigError

MAX_JSON_BYTES = 16 << 20
"""Size limit of a JSON file in a run folder."""
GZIP_LEVEL = 4
"""Higher levels take several times as long for a few percent."""
MAX_GZIP_RATIO, MIN_GZIP_TEXT = 64, 64 << 20
"""A compressed trace is read up to this many times its size, or MIN_GZIP_TEXT bytes: traces compress 10 to 30 times,
and a file that compresses more would take minutes for a few megabytes."""
MAX_JSON_VALUES = 1 << 20
"""Limit of the values in a JSON file: a value of two bytes in a file takes a hundred in memory."""
MAX_JSON_DEPTH = 64
"""Limit of nested lists and objects in a JSON file."""


def open_descriptor(path: str | Path, flags: int, *, follow: bool = False) -> int:
    """Opens a regular file and returns its descriptor; raises OSError for anything else.

    Opening a pipe could block for ever, and reading a device might never end. A file of a run folder is opened without
    `follow`: the folder may come from somebody else, and a symbolic link in it could lead to any file of the user.
    """
    try:
        file = os.open(path, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, or a pipe that nobody reads
            raise OSError(error.errno, "not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def is_inside(folder: Path, file: Path) -> bool:
    """Whether the links of a file, if it has any, lead to a file of the folder or, where the folder is in a snapshot of
    the Hugging Face cache, to a blob of that cache.
    """
    root = folder.resolve()
    blobs = [parent.parent.parent / "blobs" for parent in (root, *root.parents) if parent.parent.name == "snapshots"]
    return any(file.resolve().is_relative_to(allowed) for allowed in (root, *blobs))


def open_regular_file(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file for reading; see `open_descriptor`."""
    return open(open_descriptor(path, os.O_RDONLY, follow=follow), "rb")


def gzip_text_limit(file: BinaryIO) -> int:
    """Returns how many bytes of text are read of an open gzip file, which is untrusted."""
    return max(MIN_GZIP_TEXT, MAX_GZIP_RATIO * os.fstat(file.fileno()).st_size)


def create_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """Creates a new file of a run folder and returns its descriptor; raises ConfigError if that is not possible."""
    try:
        return open_descriptor(path, flags | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> ConfigError:
    """Returns the error that reports a file of a run folder that cannot be written."""
    return ConfigError(
        f"{path} cannot be written: {error.strerror}",
        "try --run DIR with a writable folder, and the limits of ulimit -a",
    )


def file_inside(root: Path, name: str, hint: str = "expected a file of the folder") -> Path:
    """A file of a folder. A symbolic link that leads out of it (`is_inside`) raises ConfigError."""
    file = root / name
    if not is_inside(root, file):
        raise ConfigError(f"{file} is a symbolic link out of its folder", hint)
    return file


def read_regular_file(path: Path, max_bytes: int, name: str, expected: str, *, follow: bool = True) -> bytes:
    """Reads an untrusted file of at most `max_bytes` bytes.

    Args:
        path: the file to read.
        max_bytes: size limit; nothing beyond it is read into memory.
        name: what the file is called in an error message, including its path.
        expected: what the file should be, for the hint of the error.
        follow: whether the file may be a symbolic link. False for a file of a run folder.
    """
    try:
        with open_regular_file(path, follow=follow) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}", f"expected {expected}") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{name} is larger than {max_bytes:,} bytes", f"expected {expected}")
    return content


def read_json(
    path: Path, expected: str = "a file that Meshwright wrote into a run folder", *, follow: bool = False
) -> Any:
    """Reads an untrusted JSON file of at most MAX_JSON_BYTES."""
    content = read_regular_file(path, MAX_JSON_BYTES, str(path), expected, follow=follow)
    return parse_json(content, str(path), expected)


def parse_json(content: bytes, name: str, expected: str, *, unique_keys: bool = False) -> Any:
    """Parses untrusted JSON of at most MAX_JSON_VALUES values and MAX_JSON_DEPTH levels.

    `name` and `expected` are those of `read_regular_file`. The limits bound the memory of the result, and the recursion
    of whoever reads it. With `unique_keys`, an object that has a key twice is an error; else the last value counts.
    """

    def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise ConfigError(f"{name} has the key {key[:40]!r} twice", f"expected {expected}")
            value[key] = item
        return value

    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ConfigError(f"{name} has more than {MAX_JSON_VALUES:,} values", f"expected {expected}")
    too_deep = ConfigError(f"{name} has more than {MAX_JSON_DEPTH} levels of nesting", f"expected {expected}")
    try:
        value = json.loads(content.decode(), object_pairs_hook=unique_object if unique_keys else None)
    except RecursionError:
        raise too_deep from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not JSON: it is not text in UTF-8", f"expected {expected}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}", f"expected {expected}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ConfigError(f"{name} has a number with too many digits", f"expected {expected}") from None
    level, depth = [value], 0
    while level := [
        item
        for parent in level
        if isinstance(parent, dict | list)
        for item in (parent.values() if isinstance(parent, dict) else parent)
    ]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise too_deep
    return value


def atomic_write(path: Path, content: str | Iterable[str]) -> None:
    """Replaces a text file atomically and durably.

    A reader sees either the old file or the new one, also after a power loss. The folder must exist: a run folder that
    was deleted does not come back. A file whose name ends with .gz is compressed. If `path` is a symbolic link, the
    link is replaced, not the file that it points to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            lines = [content] if isinstance(content, str) else content
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", GZIP_LEVEL, file) as compressed:
                    compressed.writelines(line.encode() for line in lines)
            else:
                file.writelines(line.encode() for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically and durably."""
    atomic_write(path, json.dumps(value, indent=1) + "\n")


def output_file(path: Path, option: str) -> Path:
    """Resolves a path that the user chose for an output file; raises ConfigError if no file can be created there.

    Called before the work begins, so that a mistyped path does not cost its result. `option` is the command-line option
    or argument that named the file.
    """
    hint = "expected a file in a folder that exists and is writable"
    try:
        resolved = path.resolve()
        if (resolved.exists() and not resolved.is_file()) or not resolved.parent.is_dir():
            raise ConfigError(f"{option} {path} cannot be written", hint)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, a long name, a null character
        raise ConfigError(f"{option} {path} cannot be written: {error}", hint) from None
    if not os.access(resolved.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path} cannot be written: permission denied", hint)
    return resolved


def write_output(path: Path, content: str | Iterable[str], option: str) -> None:
    """Writes an output file that the user named with `option`; raises ConfigError if that fails."""
    try:
        atomic_write(output_file(path, option), content)
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {error.strerror}",
            "expected a file in a folder that exists and is writable",
        ) from None


def printable(text: str) -> str:
    """Replaces control characters with "?": text from an untrusted file must not reach the terminal as escape codes."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def finite(value: Any) -> Any:
    """Replaces infinity and NaN with None in nested lists and dicts: JSON has neither."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def format_bytes(count: float) -> str:
    """Formats a number of bytes with three significant digits: "512 B", "1.5 GiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}" if abs(count) < 999.5 and unit != "B" else f"{count:,.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Formats a duration with three significant digits: "12.3 ms", "4.56 s"."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} us"


def format_number_of(count: int, name: str) -> str:
    """Formats a number with what it counts: "1 layout", "1,024 layouts"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def format_clock(seconds: float) -> str:
    """Formats a remaining or elapsed time as a clock does: "01:05", "01:01:40", "3d 04h"."""
    minutes, seconds = divmod(int(max(0.0, min(seconds, 1e12))), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,}d {hours % 24:02d}h"
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"


def format_count(count: float) -> str:
    """Formats a number of parameters or tokens with three significant digits: "8.03 B", "512"."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return f"{count:.3g}"


def format_si(value: float) -> str:
    """Formats a rate with three significant digits and an SI prefix, to be followed by its unit: "989 T", "12.5 G"."""
    for unit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g} {prefix}"
    return f"{value:.3g} "


def format_percent(fraction: float | None, decimals: int | None = None, *, signed: bool = False) -> str:
    """Formats a fraction as a percentage: "41%", "3.2%", "+1.5%"; "-" if there is none.

    Without `decimals`, a percentage below 9.5 has one decimal and a larger one has none.
    """
    if fraction is None:
        return "-"
    if decimals is None:
        decimals = 1 if 0 < abs(fraction) < 0.095 else 0
    if abs(fraction) * 100 < 0.5 * 10**-decimals:  # no sign on a zero
        return f"{0:.{decimals}%}"
    return f"{fraction:{'+' if signed else ''}.{decimals}%}"


def meshwright_home() -> Path:
    """Returns the folder of what is kept for a user across runs: $MESHWRIGHT_HOME or ~/.meshwright."""
    given = os.environ.get("MESHWRIGHT_HOME")
    return Path(given) if given else Path.home() / ".meshwright"
