"""The launching side of `meshwright train` on a host: starts the nursery, waits for its result. Never imports torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from meshwright.config import RunConfig, to_dict
from meshwright.errors import Killed, MeshwrightError, Stopped
from meshwright.launch.failures import Failure, RanksFailed
from meshwright.record.folder import RunFolder


class Running(Protocol):
    """Something that trains: the nursery's ranks, or ranks forked from this very process."""

    def poll(self, seconds: float) -> bool: ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def results(self) -> list[Any]: ...


class Nursery:
    """The process that imports torch and forks the ranks, seen from the one that does neither."""

    def __init__(self, config: RunConfig, folder: RunFolder, attempt: int) -> None:
        self._reader, writer = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(config.launch.threads), "PYTHONUNBUFFERED": "1"}
        self._log = folder.attempt(attempt) / "nursery.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.launch.nursery", str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on once
                env=environment,
            )
        os.close(writer)
        order = {
            "config": to_dict(config),
            "folder": str(folder.root.resolve()),
            "attempt": attempt,
            "parent": os.getpid(),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; its result, or the lack of one, says why
        self._result = b""
        self._asked = 0

    def poll(self, seconds: float) -> bool:
        if select.select([self._reader], [], [], seconds)[0]:
            block = os.read(self._reader, 1 << 16)
            self._result += block
            if not block:
                self._process.wait()
                return True
        return False

    def signal(self, number: int) -> None:
        self._asked = number
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # its ranks die with it

    def results(self) -> list[Any]:
        os.close(self._reader)
        if not self._result and self._asked:
            raise Stopped(self._asked, 0)  # it had not come to listen for signals yet
        if not self._result:
            lines = self._log.read_text(errors="replace").splitlines()[-15:]
            failure = Failure.silent(0, self._process.returncode)
            raise MeshwrightError(
                "\n".join(
                    [f"the process that starts the ranks ended: {failure.message.removeprefix('rank 0 ')}", *lines]
                )
            )
        result = json.loads(self._result)
        if "error" in result:
            error = MeshwrightError(result["error"])
            error.exit_code = result["exit_code"]
            raise error
        if "failures" in result:
            raise RanksFailed([Failure(**failure) for failure in result["failures"]])
        return [result["summary"]]


def attend(running: Running, tick: Callable[[], None]) -> list[Any]:
    """Waits for the end, ticking meanwhile. A first signal asks the ranks to stop at one step, a second ends them."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda got, _frame: asked.append(got)) for number in numbers}
    told = False
    try:
        while not running.poll(0.1):
            tick()
            if asked and not told:
                told = True
                running.signal(asked[0])
                print("meshwright: stopping before the next step; once more to kill", file=sys.stderr, flush=True)
            elif len(asked) > 1:
                running.kill()
                raise Killed(asked[-1])
        tick()
    except BaseException:
        running.kill()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return running.results()
