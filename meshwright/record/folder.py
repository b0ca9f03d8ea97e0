"""The run folder: where everything a run leaves behind is, and who may write there. Torch-free."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import BusyError, ConfigError

LARGEST_JSON = 16 << 20


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @property
    def run_file(self) -> Path:
        return self.root / "run.toml"

    @property
    def identity_file(self) -> Path:
        return self.root / "identity.json"

    def events(self, rank: int) -> Path:
        return self.root / "events" / f"rank-{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        return self.root / "attempts" / f"{number:04d}"

    def log(self, attempt: int, rank: int) -> Path:
        """What a rank printed."""
        return self.attempt(attempt) / f"rank-{rank:05d}.log"

    def new_attempt(self) -> int:
        """Makes the next attempt's folder. mkdir is atomic: no two attempts get one number."""
        number = self.last_attempt() + 1
        while True:
            try:
                self.attempt(number).mkdir(parents=True)
                return number
            except FileExistsError:
                number += 1

    def last_attempt(self) -> int:
        return max((int(p.name) for p in (self.root / "attempts").glob("[0-9]*") if p.name.isdigit()), default=0)

    def set_aside(self) -> None:
        """Moves what the folder holds to the first free NAME.old-K beside it; nothing is deleted."""
        root = self.root.resolve()
        if root.exists():
            with self.held():
                number = 1
                while (aside := root.with_name(f"{root.name}.old-{number}")).exists():
                    number += 1
                os.rename(root, aside)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder for this process; a second job is refused at once. The kernel lets go when the holder
        dies.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"run folder {self.root} cannot be made: {error.strerror}",
                "allowed: --run DIR, a folder that can be written",
            ) from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(file, 200, 0).decode(errors="replace").strip()
                raise BusyError(
                    f"run folder {self.root} is held by {holder or 'another job'}",
                    "wait for it, end it, or give another --run DIR",
                ) from None
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            yield
        finally:
            os.close(file)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file whole: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """A JSON file of a run folder; a file too large or broken is named, not taken into memory."""
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_JSON + 1)
        if len(raw) > LARGEST_JSON:
            raise ValueError(f"over {LARGEST_JSON:,} bytes")
        return json.loads(raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "give a run folder") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", "give a run folder") from None
