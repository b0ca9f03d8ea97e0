"""The server of `ExperimentRunner`: it imports torch once and forks a child per experiment, which it limits.

It runs as `python -P -m meshwright_practice.cards.experiment_process RESULTS PARENT FOLDER`. Requests arrive
as lines of JSON on standard input; events (start, progress, end) are written to the file descriptor RESULTS as lines of
JSON.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.incidents import tail_lines
from meshwright.core.launch.descendants import end_descendants, lead_session
from meshwright.errors import MeshwrightError, cut_text, describe_exception
from meshwright_practice.cards.card import Experiment
from meshwright_practice.cards.runner import observation_to_json

Event = dict[str, Any]
POLL_SECONDS = 0.2
MAX_RESULT_BYTES = 16 << 20
LOG_LINES = 12


def main(results: int, parent: int, folder: Path) -> None:
    exit_with_parent(parent)
    warm_up()
    for line in sys.stdin.buffer:
        for event in run_limited(json.loads(line), folder):
            os.write(results, json.dumps(event).encode() + b"\n")


def warm_up() -> None:
    """Imports what every experiment needs, so that no child does. Nothing here may start a thread: children fork."""
    import torch

    from meshwright.core.launch.ranks import preload_optimizer

    torch.set_num_threads(1)
    preload_optimizer()


def run_limited(request: dict[str, Any], parent: Path) -> Iterator[Event]:
    """Yields the events of one experiment. Its temporary files are removed before the last one."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        with suppress(Exception):  # the child reports what is wrong
            Experiment(request["run"]).load(request["package"])
        yield {"event": "start"}
        end = yield from supervise_child(request, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    yield end


def supervise_child(request: dict[str, Any], folder: Path) -> Generator[Event, None, Event]:
    """Forks the child, reads its result, and ends it at its limits. Yields its progress and returns the last event."""
    reader, writer = os.pipe()
    mark = f"experiment-{os.getpid()}-{time.monotonic_ns()}"
    began, server = time.monotonic(), os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        run_child(request, folder, writer, server, mark)
    os.close(writer)
    content, peak, failure, status, interval = b"", 0, "", None, POLL_SECONDS / 20
    try:
        while status is None:
            if select.select([reader], [], [], interval)[0]:
                block = os.read(reader, 1 << 16)
                content += block
                if not block:  # the child has closed the pipe, and ends
                    time.sleep(POLL_SECONDS / 20)
            interval = min(POLL_SECONDS, 2 * interval)  # a short experiment is sampled too
            seconds, used = time.monotonic() - began, memory_bytes(child)
            peak = max(peak, used)
            failure = exceeded(request, seconds, used, len(content))
            if failure:
                os.kill(child, signal.SIGKILL)
            ended, wait_status = os.waitpid(child, 0 if failure else os.WNOHANG)
            status = wait_status if ended else None
            seconds = time.monotonic() - began
            yield {"event": "progress", "seconds": seconds, "bytes": used}
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            while block := os.read(reader, 1 << 16):
                content += block
    finally:
        os.close(reader)
        end_descendants(mark, child)
    end = {"event": "end", "seconds": seconds, "peak_bytes": peak}
    result = {"failure": failure} if failure else parse_result(content, status)
    log = "\n".join(tail_lines(folder / "log")[-LOG_LINES:]) if "failure" in result else ""
    return end | result | {"log": log}


def exceeded(request: dict[str, Any], seconds: float, used: int, result_bytes: int) -> str:
    """Which limit an experiment has reached, or an empty text."""
    if seconds > request["seconds"]:
        return f"it had not ended after {request['seconds']:g} s and was killed"
    if used > request["bytes"]:
        return f"it used {used / 2**30:.2f} GiB of memory, more than {request['bytes'] / 2**30:.3g} GiB, and was killed"
    return f"its result is larger than {MAX_RESULT_BYTES:,} bytes" if result_bytes > MAX_RESULT_BYTES else ""


def parse_result(content: bytes, status: int) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(content)
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name} ended it" if code < 0 else f"it exited with code {code}"
        return {"failure": f"{how} before it had a result"}
    return value


def run_child(request: dict[str, Any], folder: Path, writer: int, server: int, mark: str) -> NoReturn:
    """The child: runs the experiment, writes its result and ends."""
    status = 1
    try:
        exit_with_parent(server)
        lead_session(mark)
        redirect(folder / "log")
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        value = run_experiment(request)
        with open(writer, "wb") as file:
            file.write(json.dumps(value).encode())
        status = 0
    finally:
        os._exit(status)  # a forked process must not run its parent's exit handlers


def run_experiment(request: dict[str, Any]) -> dict[str, Any]:
    """The observation as JSON, or the reason why there is none."""
    try:
        return observation_to_json(Experiment(request["run"]).load(request["package"])(request["knobs"]))
    except MeshwrightError as error:
        return {"failure": cut_text(" ".join(str(error).splitlines()))}
    except Exception as error:  # noqa: BLE001  every failure of an experiment is reported
        import traceback

        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {' '.join(describe_exception(error).splitlines())}"}


def redirect(log: Path) -> None:
    """Sends what the experiment and its ranks print to a log, and gives them no input."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)


def memory_bytes(root: int) -> int:
    """The proportional set size of a process and its descendants, or their resident size where PSS is not available."""
    return sum(map(process_bytes, descendants(root)))


def descendants(root: int) -> set[int]:
    """A process and those that descend from it, by their parents; none of them changes its parent while it lives."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def process_bytes(pid: int) -> int:
    for file, field in (("smaps_rollup", b"Pss:"), ("status", b"VmRSS:")):
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/{file}").read_bytes().splitlines()
            return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
