"""The supervisor: signals that arrive while no rank runs."""

from __future__ import annotations

import signal

import pytest

from meshwright.base.config import LaunchConfig
from meshwright.base.environment import forwarded_signal, stop_signals
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.incidents import read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.supervisor import supervise
from meshwright.errors import MeshwrightError, StoppedBySignal


class EndedRanks:
    """Ranks that have ended; the supervisor receives a signal while it collects their results."""

    launcher_pid = 0

    def __init__(self, number: int, fails: bool) -> None:
        self.number, self.fails = number, fails

    def poll(self, seconds: float) -> bool:
        return True

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def kill_rank(self, rank: int) -> None: ...

    def read_heartbeats(self) -> dict:
        return {}

    def results(self) -> list[str]:
        if self.number:
            signal.raise_signal(self.number)
        if self.fails:
            raise RanksFailed([Failure(0, "Killed", "rank 0 was killed by signal 9 (SIGKILL)", 8, 0.0)])
        return ["done"]


class SilentViewer:
    def tick(self) -> None: ...

    def show(self, event: dict) -> None: ...

    def close(self) -> None: ...


def test_host_that_ignores_sigint_is_stopped_by_that_of_another_host():
    """Its own processes ignore SIGINT, too: they are told by SIGTERM."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGTERM,)
        assert [forwarded_signal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [forwarded_signal(number) for number in stop_signals()] == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["results", "restart"])
def test_signal_between_two_attempts_stops_the_job(tmp_path, number, at):
    folder, started = RunFolder(tmp_path / "run"), []
    previous = signal.getsignal(number)

    def start(attempt: int, restart: int) -> EndedRanks:
        started.append(attempt)
        return EndedRanks(number if at == "results" else 0, fails=True)

    def report(text: str) -> None:  # called between two attempts
        signal.raise_signal(number)

    with pytest.raises(MeshwrightError) as stopped:
        supervise(folder, LaunchConfig(restarts=3), start, lambda attempt: SilentViewer(), report=report)
    assert stopped.value.exit_code == 128 + number
    assert started == [1]
    assert read_incidents(folder)[-1].outcome == ("failed" if at == "results" else "stopped")
    assert signal.getsignal(number) is previous


def test_signal_at_the_end_of_a_job_is_reported_on_request(tmp_path):
    def run(raise_on_signal: bool) -> str:
        return supervise(
            RunFolder(tmp_path / str(raise_on_signal)),
            LaunchConfig(),
            lambda *_: EndedRanks(signal.SIGINT, fails=False),
            lambda attempt: SilentViewer(),
            raise_on_signal=raise_on_signal,
        )

    assert run(raise_on_signal=False) == "done"
    with pytest.raises(StoppedBySignal):
        run(raise_on_signal=True)
