"""The requests that an `ObjectStore` makes, one method per request, with the library obstore. Torch-free."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.base.store.interface import Buffer
from meshwright.base.store.object_url import allows_http
from meshwright.errors import ConfigError

PART_BYTES = 16 << 20
"""The size of the parts of a multipart upload. S3 accepts at most 10,000 parts."""
PARTS_IN_FLIGHT = 4
"""The parts of one upload that are sent at the same time."""
LONGEST_SECONDS = 86_400.0
"""The time limit of an answer of which something arrives all the time."""
MAX_OBJECT_BYTES = 10_000 * PART_BYTES
TOKEN = "meshwrighttoken"
"""The metadata field in which an object carries the token of its writer. Azure allows no hyphen, some proxies no
underscore.
"""
STATUS = re.compile(r"status(?: code)?:? (\d{3})")
CODE = re.compile(r"<Code>(\w{1,60})</Code>")
TIMED_OUT = re.compile(r"kind: Timeout|timed out")
CONFLICT, EXISTS = "409", "BlobAlreadyExists"
"""The status of a request that another one for the same object prevents. Azure answers with it, and with this code, if
a condition is not met; S3 means that the request is to be made again.
"""
CAUSES = {
    "connection refused": "the connection was refused",
    "dns error": "the host name was not found",
    "connection closed": "the connection was closed",
    "connection reset": "the connection was reset",
    "error sending request": "the request could not be sent",
    "missing region": "the region is not set (AWS_REGION)",
    "error decoding response": "the response was cut off",
}
"""Text of an error of the library -> what it means. The library's own text may contain a credential."""


@dataclass(frozen=True)
class RequestLimits:
    """How long and how often the requests of a store are made."""

    retries: int = 8
    seconds: float = 60.0
    """The time from the first try of a request, beside that of its body, after which it is not tried again."""
    timeout: float = 20.0
    """The time without an answer, or between two blocks of an answer, after which a try fails."""
    slowest_rate: float = 64 << 10
    """The bytes per second of the slowest link: a body may take so long beside `timeout`. The library cannot tell how
    much of a body has been sent.
    """
    first_backoff: float = 0.1
    max_backoff: float = 8.0

    def body_seconds(self, size: int) -> float:
        return size / self.slowest_rate


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


@contextmanager
def failing_safely(timed_out: str) -> Iterator[None]:
    """Translates the errors of obstore. Their text contains URLs and responses, so none of it is passed on."""
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotSupportedError,
        PermissionDeniedError,
        UnauthenticatedError,
    )

    try:
        yield
    except FileNotFoundError as error:
        if (code := CODE.search(str(error))) and code[1] == "NoSuchBucket":
            raise RequestFailed("the bucket does not exist", retry=False) from None
        raise FileNotFoundError from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise RequestFailed(f"access was denied{describe_status(error)}", retry=False, denied=True) from None
    except NotSupportedError:
        raise RequestFailed("the store does not support this request", retry=False) from None
    except BaseError as error:
        status, code = STATUS.search(str(error)), CODE.search(str(error))
        found = status[1] if status else ""
        if isinstance(error, AlreadyExistsError) and (found != CONFLICT or (code and code[1] == EXISTS)):
            raise FileExistsError from None
        if found in ("401", "403"):
            raise RequestFailed(f"access was denied{describe_status(error)}", retry=False, denied=True) from None
        final = found in ("400", "405", "412", "416", "501")
        cause = timed_out if not found and TIMED_OUT.search(str(error)) else describe_cause(error)
        raise RequestFailed(cause, retry=not final) from None


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
        self.obstore, _ = import_obstore()
        self.url, self.limits = url, limits
        self.senders: dict[tuple[float, bool], Any] = {}
        """The clients that send bodies: the time limit of a request is a property of its client."""
        self.client = self.open(LONGEST_SECONDS, read_timeout=duration(limits.timeout))
        """Makes the requests without a body. Their time limit begins again with every block of the answer."""

    def sender(self, seconds: float, retries: bool = False) -> Any:
        key = seconds, retries
        return self.senders.setdefault(key, self.senders.get(key) or self.open(seconds, retries))

    def open(self, seconds: float, retries: bool = False, **options: str) -> Any:
        """A client whose requests end after so many seconds. It makes each of them once: `ObjectStore` repeats it. With
        `retries`, it repeats the parts of an upload itself.
        """
        limits = self.limits
        connect = duration(min(5.0, limits.timeout))
        client = {"timeout": duration(seconds), "connect_timeout": connect, "allow_http": allows_http(), **options}
        backoff = {
            "init_backoff": datetime.timedelta(seconds=limits.first_backoff),
            "max_backoff": datetime.timedelta(seconds=limits.max_backoff),
            "base": 2,
        }
        retried = {
            "max_retries": limits.retries,
            "backoff": backoff,
            "retry_timeout": datetime.timedelta(seconds=limits.seconds + seconds),
        }
        try:
            from_url = import_obstore()[1]
            return from_url(self.url, client_options=client, retry_config=retried if retries else {"max_retries": 0})
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.url}: the object store is not configured: {type(error).__name__}",
                "expected the usual variables of its credentials: AWS_*, GOOGLE_* or AZURE_*",
            ) from None

    def receiving(self) -> AbstractContextManager[None]:
        return failing_safely(f"nothing arrived for {self.limits.timeout:g} s")

    def put(self, name: str, content: Buffer, token: str, create: bool) -> None:
        size = max(1 << 16, 1 << (len(content) - 1).bit_length())  # a power of two, so that there are few clients
        seconds = self.limits.timeout + self.limits.body_seconds(size)
        with failing_safely(f"{len(content):,} bytes were not sent within {seconds:.1f} s"):
            client, mode = self.sender(seconds), "create" if create else "overwrite"
            self.obstore.put(client, name, content, mode=mode, attributes={TOKEN: token}, use_multipart=False)

    def get(self, name: str, length: int) -> tuple[bytes, str]:
        with self.receiving():
            answer = self.obstore.get(self.client, name, options={"range": (0, length)})
            return bytes(answer.bytes()), str(answer.attributes.get(TOKEN, ""))

    def read(self, name: str, start: int, length: int) -> bytes:
        with self.receiving():
            return bytes(self.obstore.get_range(self.client, name, start=start, length=length))

    def head(self, name: str) -> tuple[int, str]:
        with self.receiving():
            answer = self.obstore.get(self.client, name, options={"head": True})
            return int(answer.meta["size"]), str(answer.attributes.get(TOKEN, ""))

    def list_folder(self, folder: str) -> list[str]:
        with self.receiving():
            answer = self.obstore.list_with_delimiter(self.client, folder or None)
            paths = [*answer["common_prefixes"], *(found["path"] for found in answer["objects"])]
            return sorted(path.rpartition("/")[2] for path in paths)

    def list_sizes(self, folder: str) -> dict[str, int]:
        with self.receiving():
            pages = self.obstore.list(self.client, folder or None, chunk_size=1000)
            return {found["path"]: found["size"] for page in pages for found in page}

    def delete(self, names: Sequence[str]) -> None:
        with self.receiving():
            try:
                self.obstore.delete(self.client, list(names))
            except FileNotFoundError:  # of several names, the others may remain
                for name in names:
                    with suppress(FileNotFoundError):
                        self.obstore.delete(self.client, name)

    def upload(self, name: str, blocks: Iterator[Buffer], token: str) -> None:
        # The parts in flight share the link. A part that fails is sent again alone.
        seconds = self.limits.timeout + self.limits.body_seconds(PARTS_IN_FLIGHT * PART_BYTES)
        with failing_safely(f"{PARTS_IN_FLIGHT} parts of {PART_BYTES:,} bytes were not sent within {seconds:.1f} s"):
            self.obstore.put(
                self.sender(seconds, retries=True),
                name,
                blocks,
                attributes={TOKEN: token},
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            )


def duration(seconds: float) -> str:
    return f"{round(1000 * seconds)}ms"


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
