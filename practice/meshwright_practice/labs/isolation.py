"""Runs a function in a forked process that may do anything: exit, hang, fork, print without end. Torch-free.

The function reports JSON objects, which arrive even if the process does not end well. Its output is captured up to a
limit, and every process that it has started ends with it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import secrets
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from meshwright.base.parent_death import exit_with_parent
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.core.launch.descendants import end_descendants, lead_session, orphans_ended

MAX_OUTPUT, MAX_REPORTS = 16 << 10, 1 << 20
"""Bytes of output and of reports that are kept; what follows is read and dropped."""
MAX_MEMORY = 6 << 30
"""Bytes of data that one process may allocate, those of torch included."""
MAX_FILE = 256 << 20
"""Bytes that a process may write into one file."""
GRACE = 0.5
"""Seconds that the process has to write the lines in which it is."""
POLL = 0.05
FOLDER_PREFIX = "meshwright-lab-"

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class IsolatedRun:
    """How a run ended. `status` is an exit status, or minus the number of the signal that ended the process."""

    reports: tuple[dict[str, Any], ...]
    output: str
    status: int
    timed_out: bool
    stack: str
    """the lines in which the threads were when the time was up, as faulthandler writes them"""


def run_isolated(function: Callable[[Report], None], seconds: float) -> IsolatedRun:
    """Runs `function(report)` in a forked process for at most `seconds`."""
    mark = secrets.token_hex(8)
    report_reader, report_writer = os.pipe()
    output_reader, output_writer = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    remove_stale_folders(FOLDER_PREFIX)
    with scratch_folder() as scratch, tempfile.TemporaryFile() as stack, orphans_ended():
        pid = os.fork()
        if not pid:
            os.close(report_reader)
            os.close(output_reader)
            child_main(function, parent, mark, report_writer, output_writer, stack, scratch)
        os.close(report_writer)
        os.close(output_writer)
        reports, output = BoundedPipe(report_reader, MAX_REPORTS), BoundedPipe(output_reader, MAX_OUTPUT)
        status = None
        try:
            status = wait_for(pid, (reports, output), seconds)
            timed_out = status is None
            if timed_out:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                wait_for(pid, (reports, output), GRACE, reap=False)
        finally:
            if status is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            end_descendants(mark, pid)
            for pipe in (reports, output):
                pipe.read()
                pipe.close()
        stack.seek(0)
        where = stack.read(MAX_OUTPUT).decode(errors="replace")
    return IsolatedRun(parse_reports(reports.content), output.text(), status, timed_out, where)


@contextmanager
def scratch_folder() -> Iterator[str]:
    """The folder of temporary files of one run. If this process is killed, the next run removes it."""
    folder = ScratchFolder(FOLDER_PREFIX)
    try:
        yield str(folder.path)
    finally:
        folder.remove()


def wait_for(pid: int, pipes: tuple[BoundedPipe, ...], seconds: float, reap: bool = True) -> int | None:
    """Reads the pipes until the process ends, and returns its status; None if it has not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            if not pipe.ended:
                selector.register(pipe.reader, selectors.EVENT_READ, pipe)
        while time.monotonic() < deadline:
            if selector.get_map():
                for key, _ in selector.select(POLL):
                    key.data.read()
                    if key.data.ended:
                        selector.unregister(key.fileobj)
            else:
                time.sleep(POLL)
            if reap:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
    return None


class BoundedPipe:
    """The reading end of a pipe. Everything is read, so that the writer never waits, and the first bytes are kept."""

    def __init__(self, reader: int, limit: int) -> None:
        os.set_blocking(reader, False)
        self.reader, self.limit = reader, limit
        self.content, self.dropped, self.ended = b"", 0, False

    def read(self) -> None:
        """Reads what is there, at most a few blocks: a writer without end must not keep this process."""
        for _ in range(64):
            try:
                block = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return
            if not block:
                self.ended = True
                return
            kept = block[: max(0, self.limit - len(self.content))]
            self.content += kept
            self.dropped += len(block) - len(kept)

    def close(self) -> None:
        os.close(self.reader)

    def text(self) -> str:
        text = self.content.decode(errors="replace")
        return f"{text}\n... {self.dropped:,} more bytes of output were dropped" if self.dropped else text


def parse_reports(content: bytes) -> tuple[dict[str, Any], ...]:
    """The complete JSON objects among the lines."""
    reports = []
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                reports.append(value)
    return tuple(reports)


def child_main(
    function: Callable[[Report], None],
    parent: int,
    mark: str,
    reports: int,
    output: int,
    stack: BinaryIO,
    scratch: str,
) -> NoReturn:
    """The main function of the forked process."""
    status = 1
    try:
        owner = os.getpid()
        exit_with_parent(parent)
        lead_session(mark)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()  # a crash is reported, not printed
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        redirect_streams(output)
        os.environ["TMPDIR"] = tempfile.tempdir = scratch  # the parent removes it, however this process ends
        for kind, limit in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, MAX_MEMORY),
            (resource.RLIMIT_FSIZE, MAX_FILE),
        ):
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

        def report(value: dict[str, Any]) -> None:
            if os.getpid() != owner:  # the function has forked, and its copy has come back here
                os._exit(0)
            line = json.dumps(value).encode() + b"\n"
            while line:
                line = line[os.write(reports, line) :]

        function(report)
        status = 0
    except BaseException as error:  # noqa: BLE001  the end of the process is the report of everything else
        with suppress(Exception):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def redirect_streams(output: int) -> None:
    """Reads from nothing, and writes to the pipe, also from processes that are started later."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the streams live as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
