"""The files of a page (HTML, styles, scripts) that are part of the package, read into memory. Torch-free.

A page serves only these: no part of an address becomes a path.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from starlette.responses import PlainTextResponse, Response

WATCH_PACKAGE = "meshwright.insight.watch"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "": "text/plain"}
"""The types of the files, by suffix."""


class PageFiles:
    """The files in the folder `static` of packages, and in the folders `folders` below it. Of two files with the same
    name, that of the later package counts.
    """

    def __init__(self, packages: Iterable[str], folders: Iterable[str] = ()) -> None:
        self._files: dict[str, tuple[bytes, str]] = {}
        for package in packages:
            root = files(package) / "static"
            for prefix, place in (("", root), *((f"{name}/", root / name) for name in folders)):
                for file in place.iterdir() if place.is_dir() else ():
                    if file.is_file():
                        suffix = file.name.rpartition(".")[2] if "." in file.name else ""
                        self._files[prefix + file.name] = (file.read_bytes(), TYPES[suffix])

    def answer(self, name: str) -> Response:
        """Answers the request for a file."""
        if name not in self._files:
            return PlainTextResponse("not found", 404)
        content, media_type = self._files[name]
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    def text(self, name: str) -> str:
        return self._files[name][0].decode()
