"""The requests that an `ObjectStore` makes, one method per request, with the library obstore. Torch-free."""

from __future__ import annotations

import datetime
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from meshwright.base.store.interface import Buffer
from meshwright.base.store.object_url import allows_http
from meshwright.errors import ConfigError

PART_BYTES = 16 << 20
"""The size of the parts of a multipart upload. S3 accepts at most 10,000 parts."""
PARTS_IN_FLIGHT = 4
"""The parts of one upload that are sent at the same time."""
MAX_OBJECT_BYTES = 10_000 * PART_BYTES
TOKEN = "meshwrighttoken"
"""The metadata field in which an object carries the token of its writer. Azure allows no hyphen, some proxies no
underscore.
"""
STATUS = re.compile(r"status(?: code)?:? (\d{3})")
CODE = re.compile(r"<Code>(\w{1,60})</Code>")
CAUSES = {
    "timed out": "the request timed out",
    "connection refused": "the connection was refused",
    "dns error": "the host name was not found",
    "connection closed": "the connection was closed",
    "connection reset": "the connection was reset",
    "error sending request": "the request could not be sent",
    "missing region": "the region is not set (AWS_REGION)",
    "error decoding response": "the response was cut off",
}
"""Text of an error of the library -> what it means. The library's own text may contain a credential."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RequestLimits:
    """How long and how often the requests of a store are made."""

    retries: int = 8
    seconds: float = 60.0
    """The time from the first try of a request after which it is not tried again."""
    timeout: float = 20.0
    """The time limit of one try."""
    first_backoff: float = 0.1
    max_backoff: float = 8.0


class RequestFailed(Exception):
    """A request that failed. The message is the cause, without anything secret."""

    def __init__(self, cause: str, retry: bool, denied: bool = False) -> None:
        super().__init__(cause)
        self.retry, self.denied = retry, denied
        """Whether another try may succeed; whether access was denied."""


class ObjectCalls(Protocol):
    """The requests of a store. They raise FileNotFoundError, FileExistsError or RequestFailed."""

    def put(self, name: str, content: Buffer, token: str, create: bool) -> None:
        """Write an object; with `create`, only if there is none of this name, else FileExistsError."""
        ...

    def get(self, name: str, length: int) -> tuple[bytes, str]:
        """(up to `length` bytes, the token of the writer)"""
        ...

    def read(self, name: str, start: int, length: int) -> bytes: ...

    def head(self, name: str) -> tuple[int, str]:
        """(size, the token of the writer)"""
        ...

    def list_folder(self, folder: str) -> list[str]:
        """The names in a folder, of objects and of folders."""
        ...

    def list_sizes(self, folder: str) -> dict[str, int]:
        """The name and size of every object in a folder and in the folders below it."""
        ...

    def delete(self, names: Sequence[str]) -> None: ...

    def upload(self, name: str, blocks: Iterator[Buffer], token: str) -> None:
        """Write an object in parts. If `blocks` raises, the upload is aborted, and no object appears."""
        ...


def failing_safely(method: Callable[P, T]) -> Callable[P, T]:
    """Translates the errors of obstore. Their text contains URLs and responses, so none of it is passed on."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            NotSupportedError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        try:
            return method(*args, **kwargs)
        except FileNotFoundError as error:
            if (code := CODE.search(str(error))) and code[1] == "NoSuchBucket":
                raise RequestFailed("the bucket does not exist", retry=False) from None
            raise FileNotFoundError from None
        except AlreadyExistsError:
            raise FileExistsError from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise RequestFailed(f"access was denied{describe_status(error)}", retry=False, denied=True) from None
        except NotSupportedError:
            raise RequestFailed("the store does not support this request", retry=False) from None
        except BaseError as error:
            status = STATUS.search(str(error))
            if status is not None and status[1] in ("401", "403"):
                raise RequestFailed(f"access was denied{describe_status(error)}", retry=False, denied=True) from None
            final = status is not None and status[1] in ("400", "405", "412", "416", "501")
            raise RequestFailed(describe_cause(error), retry=not final) from None

    return call


def describe_cause(error: Exception) -> str:
    """The cause of an error in known words: the text of the library may repeat a URL, a header or a response."""
    if text := describe_status(error):
        return f"the server answered{text}"
    message = str(error).lower()
    return next((cause for found, cause in CAUSES.items() if found in message), "the request failed")


def describe_status(error: Exception) -> str:
    status, code = STATUS.search(str(error)), CODE.search(str(error))
    return (f" {status[1]}" if status else "") + (f" {code[1]}" if code else "")


class DirectCalls:
    """The requests, made in this process."""

    def __init__(self, url: str, limits: RequestLimits) -> None:
        obstore, from_url = import_obstore()
        self.obstore = obstore
        client = {"timeout": f"{limits.timeout}s", "connect_timeout": f"{min(5.0, limits.timeout)}s"}
        options: dict[str, Any] = {**client, "allow_http": allows_http()}
        backoff = {
            "init_backoff": datetime.timedelta(seconds=limits.first_backoff),
            "max_backoff": datetime.timedelta(seconds=limits.max_backoff),
            "base": 2,
        }
        retried = {
            "max_retries": limits.retries,
            "backoff": backoff,
            "retry_timeout": datetime.timedelta(seconds=limits.seconds),
        }
        try:
            self.once = from_url(url, client_options=options, retry_config={"max_retries": 0})
            """Makes each request once: `ObjectStore` repeats it."""
            slow = options | {"timeout": f"{3 * limits.timeout}s"}
            self.retrying = from_url(url, client_options=slow, retry_config=retried)
            """Repeats the parts of an upload itself."""
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{url}: the object store is not configured: {type(error).__name__}",
                "expected the usual variables of its credentials: AWS_*, GOOGLE_* or AZURE_*",
            ) from None

    @failing_safely
    def put(self, name: str, content: Buffer, token: str, create: bool) -> None:
        mode = "create" if create else "overwrite"
        self.obstore.put(self.once, name, content, mode=mode, attributes={TOKEN: token}, use_multipart=False)

    @failing_safely
    def get(self, name: str, length: int) -> tuple[bytes, str]:
        answer = self.obstore.get(self.once, name, options={"range": (0, length)})
        return bytes(answer.bytes()), str(answer.attributes.get(TOKEN, ""))

    @failing_safely
    def read(self, name: str, start: int, length: int) -> bytes:
        return bytes(self.obstore.get_range(self.once, name, start=start, length=length))

    @failing_safely
    def head(self, name: str) -> tuple[int, str]:
        answer = self.obstore.get(self.once, name, options={"head": True})
        return int(answer.meta["size"]), str(answer.attributes.get(TOKEN, ""))

    @failing_safely
    def list_folder(self, folder: str) -> list[str]:
        answer = self.obstore.list_with_delimiter(self.once, folder or None)
        paths = [*answer["common_prefixes"], *(found["path"] for found in answer["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    @failing_safely
    def list_sizes(self, folder: str) -> dict[str, int]:
        pages = self.obstore.list(self.once, folder or None, chunk_size=1000)
        return {found["path"]: found["size"] for page in pages for found in page}

    @failing_safely
    def delete(self, names: Sequence[str]) -> None:
        try:
            self.obstore.delete(self.once, list(names))
        except FileNotFoundError:  # of several names, the others may remain
            for name in names:
                try:
                    self.obstore.delete(self.once, name)
                except FileNotFoundError:
                    continue

    @failing_safely
    def upload(self, name: str, blocks: Iterator[Buffer], token: str) -> None:
        self.obstore.put(
            self.retrying,
            name,
            blocks,
            attributes={TOKEN: token},
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=PARTS_IN_FLIGHT,
        )


def import_obstore() -> tuple[Any, Any]:
    """(obstore, its from_url); raises ConfigError if it is not installed."""
    try:
        import obstore
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            "an s3://, gs:// or az:// URL needs the package obstore", "try pip install 'meshwright[objectstore]'"
        ) from None
    return obstore, from_url


def has_started_threads() -> bool:
    """Whether obstore's threads run in this process, whoever started them. A forked process does not have them, and
    would wait for them forever.
    """
    try:
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read() for task in tasks]  # noqa: SIM115
    except OSError:
        return False
    return any(name.startswith("tokio") for name in names)
