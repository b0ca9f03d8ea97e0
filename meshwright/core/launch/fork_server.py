"""Client of the fork server: starts the server, and requests the ranks of each attempt from it. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from meshwright.base.config import RunConfig, config_to_dict
from meshwright.base.environment import forwarded_signal, start_python
from meshwright.base.io import create_file
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.heartbeat import HeartbeatReading
from meshwright.base.records.incidents import read_heartbeats, tail_lines
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.launch.descendants import MARK, end_descendants, with_mark
from meshwright.core.recover.hosts.rank_lock import lock_path
from meshwright.core.recover.lease import host_name
from meshwright.core.recover.supervisor import kill_rank
from meshwright.errors import StoppedBeforeStart


class ForkServer:
    """A process that imports torch once and forks the ranks of every attempt, controlled from a process that does not
    import torch. If the server has died, the next attempt starts a new one.
    """

    module = "meshwright.core.launch.fork_server_process"
    """What the process runs."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        fork: bool,
        fallback: bool,
        cluster: str | None = None,
        entry_points: Mapping[str, str] | None = None,
        accept_code: bool = False,
    ) -> None:
        self._config, self._folder, self._fork = config, folder, fork
        self._options: dict[str, Any] = {"fallback": fallback, "cluster": cluster, "accept_code": accept_code}
        self._entry_points = dict(entry_points or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = -1
        self._result = b""
        self._sent_signal = 0
        self._busy = False

    @property
    def launcher_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, attempt: int, restart: int, placement: HostPlacement | None = None) -> ForkServer:
        """Requests the ranks of an attempt; this object then represents them (`RunningRanks`). A `placement` says which
        of them run on this host.
        """
        self._attempt, self._ranks = attempt, placement.local_ranks if placement is not None else None
        # On several hosts every host has a server of its own, and they may share the folder.
        name = "fork_server.log" if placement is None else f"fork_server-{placement.index:05d}.log"
        self._log = self._folder.attempt(attempt) / name
        if self._process is None or self._process.poll() is not None:
            self._start_server()
        self._result, self._sent_signal, self._busy = b"", 0, True
        values = placement.to_json() if placement is not None else None
        self._send({"attempt": attempt, "restart": restart, "fork": self._fork, "placement": values})
        return self

    def read_heartbeats(self) -> dict[int, HeartbeatReading]:
        """The last heartbeat of every rank of this host."""
        readings = read_heartbeats(self._folder, self._attempt)
        return {rank: reading for rank, reading in readings.items() if self._ranks is None or rank in self._ranks}

    def _has_started_a_rank(self) -> bool:
        if self._ranks is None:
            return any(self._log.parent.glob("heartbeat-*"))
        return any(self._folder.heartbeat(self._attempt, rank).exists() for rank in self._ranks)

    def kill_rank(self, rank: int) -> None:
        if (heartbeat := self.read_heartbeats().get(rank)) is not None:
            kill_rank(heartbeat)

    def _start_server(self) -> None:
        self.close()
        self._reader, writer = os.pipe()
        self._mark = secrets.token_hex(8)
        environment = os.environ | {"OMP_NUM_THREADS": str(self._config.launch.threads), "PYTHONUNBUFFERED": "1"}
        job = {"config": config_to_dict(self._config), "folder": str(self._folder.root.resolve())}
        lock = str(lock_path(self._folder.root, host_name())) if self._config.launch.hosts > 1 else ""
        job |= {"entry_points": self._entry_points, "options": self._options, "lock": lock}
        log_file = create_file(self._log, os.O_WRONLY | os.O_APPEND)
        # The job is passed in a file: a pipe has room for 64 KiB, and a stopped server would block this process.
        with open(log_file, "ab") as log, tempfile.TemporaryFile("w+") as job_file:
            json.dump(job | {"parent": os.getpid()}, job_file)
            job_file.seek(0)
            files = (writer, job_file.fileno())
            self._process = start_python(
                self.module,
                *map(str, files),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=files,
                start_new_session=True,  # the terminal's Ctrl-C reaches this process only, which forwards it once
                env=environment | {MARK: with_mark(self._mark)},
            )
        os.close(writer)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the server has ended already; `results` reports why

    def poll(self, seconds: float) -> bool:
        """Waits at most `seconds` for the result of the attempt; True once it is there or the server has ended."""
        assert self._process is not None
        has_ended = self._process.poll() is not None
        if select.select([self._reader], [], [], 0 if has_ended else seconds)[0]:
            block = os.read(self._reader, 1 << 16)
            self._result += block
            if not block:
                self._process.wait()
                self._busy = False
                return True
        elif has_ended:  # a process that a rank has started keeps the pipe open
            self._busy = False
            return True
        self._busy = not self._result.endswith(b"\n")  # a truncated line is not a result
        return not self._busy

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._sent_signal = forwarded_signal(number)
        if self._process.poll() is None:
            self._process.send_signal(self._sent_signal)
            self._process.send_signal(signal.SIGCONT)  # a stopped process handles a signal once it continues

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()  # the ranks are killed with their parent
            self._process.wait()
        end_descendants(self._mark)

    def close(self) -> None:
        """Ends the server: it exits when its standard input is closed. It is killed if an attempt still runs, or if it
        does not exit within the grace period, for example because it is stopped.
        """
        if self._process is not None and self._process.stdin is not None:
            if self._busy:
                self.kill()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._config.launch.grace_period)
            self.kill()
            os.close(self._reader)
            self._process = None

    def results(self) -> list[Any]:
        """The summary of the attempt; raises RanksFailed, or the error that the server reported."""
        assert self._process is not None
        self._result = self._result if self._result.endswith(b"\n") else b""
        if not self._result and self._sent_signal and not self._has_started_a_rank():
            raise StoppedBeforeStart(self._sent_signal)  # no rank had started
        if not self._result:
            ended = Failure.from_exit_status(0, self._process.returncode)
            message = ended.message.replace("rank 0", "the fork server", 1)
            raise RanksFailed(
                [Failure(-1, ended.error_type, message, 1, 0.0, traceback="\n".join(tail_lines(self._log)))]
            )
        result = json.loads(self._result)
        if "error" in result:
            raise RanksFailed([Failure.from_json(result["error"])]).cause()
        if "failures" in result:
            raise RanksFailed([Failure.from_json(failure) for failure in result["failures"]])
        return [result["summary"]]
