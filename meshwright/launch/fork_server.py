"""The launching side of `meshwright train` on a host: keeps the nursery, asks it for ranks. Never imports torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

from meshwright.config import RunConfig, config_to_dict
from meshwright.errors import MeshwrightError, StoppedBeforeStart
from meshwright.recover.failures import Failure, RanksFailed
from meshwright.telemetry.run_folder import RunFolder


class ForkServer:
    """The process that imports torch once and forks the ranks, attempt after attempt, seen from the one that does
    neither. Where it has died, the next attempt has a new one.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, fork: bool, fallback: bool, cluster: str | None = None
    ) -> None:
        self._config, self._folder, self._fork = config, folder, fork
        self._given = {"fallback": fallback, "cluster": cluster}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = -1
        self._result = b""
        self._asked = 0
        self._busy = False

    def start(self, attempt: int, restart: int) -> ForkServer:
        """Asks for the ranks of an attempt; this object then stands for them."""
        self._log = self._folder.attempt(attempt) / "fork_server.log"
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._result, self._asked, self._busy = b"", 0, True
        self._say({"attempt": attempt, "restart": restart, "fork": self._fork})
        return self

    def _start(self) -> None:
        self.close()
        self._reader, writer = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(self._config.launch.threads), "PYTHONUNBUFFERED": "1"}
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.launch.fork_server_process", str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on once
                env=environment,
            )
        os.close(writer)
        job = {"config": config_to_dict(self._config), "folder": str(self._folder.root.resolve())}
        self._say(job | {"parent": os.getpid(), **self._given})

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already; its result, or the lack of one, says why

    def poll(self, seconds: float) -> bool:
        assert self._process is not None
        if select.select([self._reader], [], [], seconds)[0]:
            block = os.read(self._reader, 1 << 16)
            self._result += block
            if not block:
                self._process.wait()
                self._busy = False
                return True
        self._busy = not self._result.endswith(b"\n")
        return not self._busy  # one that it was killed in the middle of is none

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._asked = number
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()  # its ranks die with it
            self._process.wait()

    def close(self) -> None:
        """Lets the nursery go: it ends when nobody can ask it for more. One that is still at an attempt is ended."""
        if self._process is not None and self._process.stdin is not None:
            if self._busy:
                self.kill()
            self._process.stdin.close()
            self._process.wait()
            os.close(self._reader)
            self._process = None

    def results(self) -> list[Any]:
        assert self._process is not None
        self._result = self._result if self._result.endswith(b"\n") else b""
        if not self._result and self._asked:
            raise StoppedBeforeStart(self._asked)  # it had not come to listen for signals yet
        if not self._result:
            lines = self._log.read_text(errors="replace").splitlines()[-15:] if self._log.exists() else []
            said = Failure.from_exit_status(0, self._process.returncode).message.removeprefix("rank 0 ")
            what = f"the process that starts the ranks {said}"
            kind = "Killed" if "signal" in said else "Exited"
            raise RanksFailed([Failure(-1, kind, what, 1, 0.0, traceback="\n".join(lines))])
        result = json.loads(self._result)
        if "error" in result:
            error = MeshwrightError(result["error"])
            error.exit_code = result["exit_code"]
            raise error
        if "failures" in result:
            raise RanksFailed([Failure.from_json(failure) for failure in result["failures"]])
        return [result["summary"]]
