"""Makes the requests of an object store in a separate process, for a process that forks the ranks. Torch-free.

The threads of obstore do not survive a fork: a forked process that uses the library again waits forever. So a process
that forks makes its requests through a child process, `python -P -m meshwright.base.store.object_process FD PARENT`,
and its forked processes can use the library themselves. The two processes exchange messages over a socket pair.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.base.environment import start_python
from meshwright.base.framing import PeerEnded, receive, send
from meshwright.base.store.interface import Buffer
from meshwright.base.store.object_calls import (
    DirectCalls,
    ObjectCalls,
    RequestFailed,
    RequestLimits,
    has_started_threads,
)
from meshwright.errors import ConfigError

PARENT_CHECK_SECONDS = 2.0
METHODS = ("put", "get", "read", "head", "list_folder", "list_sizes", "delete", "upload")


class ProcessCalls:
    """`ObjectCalls` that another process makes. Requests wait for each other; each upload has a process of its own."""

    def __init__(self, url: str, limits: RequestLimits) -> None:
        self.url, self.limits = url, limits
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None

    def start(self) -> socket.socket:
        """The connection to the process, which is started if it does not run."""
        if self.connection is not None and self.process is not None and self.process.poll() is None:
            return self.connection
        self.close()
        self.connection, other = socket.socketpair()
        arguments = str(other.fileno()), str(os.getpid())
        files = (other.fileno(),)
        try:
            # A new session: the Ctrl-C of a terminal reaches the supervisor only, which still needs the store then.
            self.process = start_python(
                "meshwright.base.store.object_process",
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=files,
                start_new_session=True,
            )
        finally:
            other.close()
        send(self.connection, {"url": self.url, "limits": asdict(self.limits)})
        header, _ = receive(self.connection)
        if "config" in header:
            self.close()
            raise ConfigError(*header["config"])
        return self.connection

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.connection = self.process = None

    def _call(self, method: str, content: Buffer = b"", **arguments: Any) -> tuple[Any, bytes]:
        with self.lock:
            try:
                connection = self.start()
                send(connection, {"call": method, "arguments": arguments}, content)
                header, answer = receive(connection)
            except (OSError, ValueError) as error:
                self.close()
                raise RequestFailed(f"the process of the store ended: {type(error).__name__}", retry=True) from None
        return decode_answer(header), bytes(answer)

    def put(self, name: str, content: Buffer, token: str, create: bool) -> None:
        self._call("put", content, name=name, token=token, create=create)

    def get(self, name: str, length: int) -> tuple[bytes, str]:
        token, content = self._call("get", name=name, length=length)
        return content, token

    def read(self, name: str, start: int, length: int) -> bytes:
        return self._call("read", name=name, start=start, length=length)[1]

    def head(self, name: str) -> tuple[int, str]:
        size, token = self._call("head", name=name)[0]
        return size, token

    def list_folder(self, folder: str) -> list[str]:
        names: list[str] = self._call("list_folder", folder=folder)[0]
        return names

    def list_sizes(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = self._call("list_sizes", folder=folder)[0]
        return sizes

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete", names=list(names))

    def upload(self, name: str, blocks: Iterator[Buffer], token: str) -> None:
        other = ProcessCalls(self.url, self.limits)
        try:
            connection = other.start()
            send(connection, {"call": "upload", "arguments": {"name": name, "token": token}})
            for block in blocks:  # if it raises, the connection is closed, which aborts the upload
                send(connection, {}, block)
            send(connection, {"end": True})
            header, _ = receive(connection)
        except PeerEnded:
            raise RequestFailed("the process of the store ended", retry=True) from None
        finally:
            other.close()
        decode_answer(header)


def decode_answer(header: dict[str, Any]) -> Any:
    """The value of an answer, or the exception that it stands for."""
    error = header.get("error")
    if error == "absent":
        raise FileNotFoundError
    if error == "exists":
        raise FileExistsError
    if error == "failed":
        raise RequestFailed(header["cause"], header["retry"], header["denied"])
    return header.get("value")


class Server:
    """The process that makes the requests: one after the other, as they arrive."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self.connection, self.parent = connection, parent

    def run(self) -> None:
        setup, _ = receive(self.connection)
        try:
            self.calls: ObjectCalls = DirectCalls(setup["url"], RequestLimits(**setup["limits"]))
        except ConfigError as error:
            send(self.connection, {"config": [error.message, error.hint]})
            return
        send(self.connection, {})
        while self.wait():
            header, content = receive(self.connection)
            send(self.connection, *self.answer(header["call"], header["arguments"], content))

    def wait(self) -> bool:
        """Whether a request has arrived; False if the parent process has ended. A rank that the parent forked may
        keep the other end of the socket open.
        """
        while not select.select([self.connection], [], [], PARENT_CHECK_SECONDS)[0]:
            if os.getppid() != self.parent:
                return False
        return True

    def answer(self, call: str, arguments: dict[str, Any], content: bytearray) -> tuple[dict[str, Any], Buffer]:
        if call not in METHODS:
            return {"error": "failed", "cause": "unknown request", "retry": False, "denied": False}, b""
        if call == "put":
            arguments = arguments | {"content": bytes(content)}
        if call == "upload":
            arguments = arguments | {"blocks": self.blocks()}
        try:
            value = getattr(self.calls, call)(**arguments)
        except FileNotFoundError:
            return {"error": "absent"}, b""
        except FileExistsError:
            return {"error": "exists"}, b""
        except RequestFailed as error:
            if call == "upload":
                self.drain()
            return {"error": "failed", "cause": str(error), "retry": error.retry, "denied": error.denied}, b""
        if call == "read":
            return {}, value
        if call == "get":
            return {"value": value[1]}, value[0]
        return {"value": value}, b""

    def blocks(self) -> Iterator[Buffer]:
        """The blocks of an upload as they arrive. A connection that is closed raises, which aborts the upload."""
        self.ended = False
        while not self.ended:
            header, content = receive(self.connection)
            self.ended = "end" in header
            if not self.ended:
                yield content

    def drain(self) -> None:
        """Reads what is left of an upload that failed."""
        while not self.ended:
            self.ended = "end" in receive(self.connection)[0]


class ForkState:
    """What this process knows about its threads and forks."""

    forking: int = 0
    """The process that forks ranks, and so must not start the threads of obstore."""
    threads_of: int = 0
    """The process in which the threads of obstore run."""
    calls: dict[tuple[int, str, RequestLimits], ObjectCalls]

    def __init__(self) -> None:
        self.calls = {}


STATE = ForkState()


def make_requests_in_another_process() -> None:
    """Called by a process that will fork ranks, before it uses a store: its forked processes can then use theirs."""
    if has_started_threads():
        STATE.threads_of = os.getpid()
    STATE.forking = os.getpid()


def open_calls(url: str, limits: RequestLimits) -> ObjectCalls:
    """The requests of a store, made in this process where that is safe, and kept for the next caller."""
    process = os.getpid()
    key = process, url, limits
    found = STATE.calls.get(key)
    if found is not None:
        return found
    safe = STATE.forking != process and STATE.threads_of in (0, process)
    opened: ObjectCalls = DirectCalls(url, limits) if safe else ProcessCalls(url, limits)
    if safe:
        STATE.threads_of = process
    return STATE.calls.setdefault(key, opened)


def close_processes() -> None:
    """Ends the processes that make requests for this one."""
    for key, calls in list(STATE.calls.items()):
        if key[0] == os.getpid() and isinstance(calls, ProcessCalls):
            del STATE.calls[key]
            with calls.lock:
                calls.close()


def main(file: int, parent: int) -> None:
    with socket.socket(fileno=file) as connection:
        try:
            Server(connection, parent).run()
        except OSError:  # the parent process has ended, or has aborted an upload
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
