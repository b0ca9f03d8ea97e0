"""The interface between Meshwright and durable storage: what a checkpoint requires of any store. Torch-free.

Checkpoints reach storage only through `Store`. A POSIX directory (`posix.py`) and an object store (`object_store.py`)
keep the same promises: `create` writes a new file once, and `publish_if_absent` is atomic and happens at most once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class OutcomeUnknown(OSError):
    """A file may or may not have been published: an answer is missing, and reading the name back does not tell."""


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, content: Buffer) -> None: ...

    def close(self) -> None:
        """Return once the content and the name of the file are durable."""
        ...

    def abort(self) -> None:
        """Release the file handle without making the file durable. A call after `close` has no effect."""
        ...


class Store(Protocol):
    """Durable files by name. A name is relative to the root of the store, with `/` between folders."""

    def create(self, name: str) -> Sink:
        """Open a new file for writing. An existing file is never overwritten: that raises FileExistsError."""
        ...

    def publish_if_absent(self, name: str, content: bytes, before_publish: Callable[[], object] = ...) -> bool:
        """Make a small file appear under `name`, atomically, unless the name exists.

        Every implementation promises:
        - a reader sees either no file or the complete content, also after a crash at any instant;
        - of any number of concurrent callers exactly one returns True, and only its content is ever visible;
        - the file is durable before the call returns True;
        - a return value of False means that the name existed and that nothing was changed;
        - an OSError means that nothing was published, except an OutcomeUnknown.
        `before_publish` runs directly before the name appears: the tests place a fault there.
        """
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file, in place of the one of that name if there is one. A reader sees the content before or
        after, never a part of it. The content need not be durable: it suits a counter that is written again.
        """
        ...

    def read(self, name: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from offset `start`; fewer only at the end of the file."""
        ...

    def size(self, name: str) -> int | None:
        """The size in bytes, or None if there is no such file."""
        ...

    def list_names(self, folder: str) -> list[str]:
        """The sorted names in a folder, of files and of folders; an absent folder is empty."""
        ...

    def remove(self, name: str) -> None:
        """Delete one file durably: after a crash it does not reappear."""
        ...

    def remove_folder(self, name: str) -> None:
        """Delete a folder and the files in it."""
        ...
