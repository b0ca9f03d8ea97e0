"""Attempt after attempt until the run is done, or until trying again would not help. Never imports torch.

Holds the lease, watches the ranks from outside, writes down why each attempt ended, and decides about the next.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from meshwright.checkpoint.listing import list_leases, list_published, open_run_store
from meshwright.config import LaunchConfig
from meshwright.errors import KilledBySignal, MeshwrightError, RestartsExhausted, StoppedBeforeStart, StoppedBySignal
from meshwright.recover.failures import RanksFailed
from meshwright.recover.incidents import Incident, assign_verdict, build_incident, read_heartbeats
from meshwright.recover.lease import Lease, acquire_lease, raise_if_held
from meshwright.recover.watchdog import Hang, Watchdog, find_collective_mismatch
from meshwright.telemetry.events import EventLog
from meshwright.telemetry.heartbeat import HeartbeatReading
from meshwright.telemetry.run_folder import RunFolder

FINAL_EXIT_CODES = (2, 3, 4, 6, 7, 9)
"""Exit codes of errors that another attempt would only meet again."""
CHECK_INTERVAL = 0.5
SECONDS_AFTER_HANG = 20.0
"""Seconds that the ranks have to end once the one that hangs was killed."""


class RunningRanks(Protocol):
    """Something that trains: the nursery's ranks, or ranks forked from this very process."""

    def poll(self, seconds: float) -> bool: ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def results(self) -> list[Any]: ...


class Viewer(Protocol):
    """Whoever looks on while an attempt runs."""

    def tick(self) -> None: ...

    def show(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


StartAttempt = Callable[[int, int], RunningRanks]
"""(attempt, restart) -> its ranks"""


def supervise(
    folder: RunFolder,
    launch: LaunchConfig,
    begin: StartAttempt,
    view: Callable[[int], Viewer],
    *,
    fresh: bool = False,
    say: Callable[[str], None] | None = None,
) -> Any:
    """The summary of a finished run. Restarts the whole job from the newest checkpoint after a failure, at most
    `launch.restarts` times without getting further in between.
    """
    if fresh:
        raise_if_held(folder)
        folder.set_aside()
    restart = futile = 0
    history: list[Incident] = []
    while True:
        lease = acquire_lease(folder)
        record_lost_attempts(folder, lease.attempt)
        attempt = Attempt(folder, launch, lease, begin, view)
        try:
            summary = attempt.run(restart)
            Incident(lease.attempt, "complete", checkpoint=newest_checkpoint_step(folder)).write(folder)
            return summary
        except RanksFailed as failed:
            incident = attempt.incident(failed, history)
            history.append(incident)
            if attempt.signalled:  # it was to end, and has ended: not as it should, but for good
                failed.exit_code = 128 + attempt.signalled
                raise
            futile = 0 if attempt.made_progress() else futile
            raise_if_final(failed, incident, futile, launch.restarts)
            restart, futile = restart + 1, futile + 1
            says = f"{describe_location(incident)}: {incident.message.splitlines()[0]}"
            step = incident.checkpoint
            onwards = f"from step {step}" if step >= 0 else "from the beginning"
            (say or warn)(f"attempt {lease.attempt} failed, {says}; restart {restart}, {onwards}")
        except MeshwrightError as error:
            outcome = (
                "stopped"
                if isinstance(error, (StoppedBySignal, StoppedBeforeStart, KilledBySignal, GracePeriodExpired))
                else "failed"
            )
            ended = Incident(lease.attempt, outcome, message=str(error), exit_code=error.exit_code)
            replace(ended, checkpoint=newest_checkpoint_step(folder)).write(folder)
            raise


def raise_if_final(failed: RanksFailed, incident: Incident, futile: int, restarts: int) -> None:
    """Raises where another attempt would not help."""
    if incident.outcome == "stopped" or failed.first.exit_code in FINAL_EXIT_CODES:
        raise failed
    if incident.verdict in ("data-dependent", "deterministic") and restarts:
        failed.verdict = f"{incident.verdict}: step {incident.step} failed again; {incident.recommendation}"
        raise failed
    if futile >= restarts:
        if not restarts:
            raise failed
        raise RestartsExhausted(
            f"{restarts} restart(s) got no further than step {max(0, incident.checkpoint)}; the last failure, "
            f"{describe_location(incident)}: {incident.message}",
            f"see attempts/*/incident.json ({incident.verdict})",
        )


@dataclass
class Attempt:
    """One attempt, from its ranks' start to the last of them."""

    folder: RunFolder
    launch: LaunchConfig
    lease: Lease
    begin: StartAttempt
    view: Callable[[int], Viewer]
    hang: Hang | None = None
    signalled: int = 0
    deadline: float = float("inf")
    last: float = float("inf")
    """when whatever still runs after a hang is ended"""

    def run(self, restart: int) -> Any:
        viewer = self.view(self.lease.attempt)
        self.log = EventLog(self.folder.root / "events" / "supervisor.jsonl", self.lease.attempt, -1, viewer.show)
        # Before a collective's own timeout, or whoever waits would be the first to fail.
        bound = min(self.launch.hang_timeout, 0.8 * self.launch.collective_timeout)
        self.watchdog = Watchdog(self.folder, self.lease.attempt, bound, self.launch.straggler_ratio)
        asked: list[int] = []
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        # Before there are ranks: a signal that comes while they start must find somebody who passes it on.
        before = {number: signal.signal(number, lambda got, _frame: asked.append(got)) for number in numbers}
        try:
            running = self.begin(self.lease.attempt, restart)
            with self.lease.keep_alive():  # a thread, so not before ranks were forked
                return self.wait(running, viewer, asked)[0]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.log.close()
            viewer.close()

    def wait(self, running: RunningRanks, viewer: Viewer, asked: list[int]) -> list[Any]:
        """Waits for the end, watching meanwhile. A first signal asks the ranks to stop at one step, a second ends
        them.
        """
        told = False
        looked = time.monotonic()
        try:
            while not running.poll(0.1):
                viewer.tick()
                if time.monotonic() - looked > CHECK_INTERVAL:
                    self.look()
                    looked = time.monotonic()
                if asked and not told:
                    told = True
                    self.begin_grace_period(asked[0])
                    running.signal(asked[0])
                    warn("stopping before the next step, with a checkpoint; once more to kill")
                elif len(asked) > 1:
                    running.kill()
                    raise KilledBySignal(asked[-1])
                if time.monotonic() > self.last:
                    running.kill()  # whoever should have ended the other ranks hangs as well
                if time.monotonic() > self.deadline:
                    running.kill()
                    raise GracePeriodExpired(
                        self.signalled, self.launch.grace_period, newest_checkpoint_step(self.folder)
                    )
            viewer.tick()
        except BaseException:
            running.kill()
            raise
        if asked:  # also one that came with the last of the ranks
            self.begin_grace_period(asked[0])
        return running.results()

    def begin_grace_period(self, number: int) -> None:
        if not self.signalled:
            self.signalled, self.deadline = number, time.monotonic() + self.launch.grace_period

    def look(self) -> None:
        if self.hang is not None:
            return
        self.hang, slow, seen = self.watchdog.look()
        for straggler in slow:
            self.tell("straggler", **vars(straggler), message=str(straggler))
        if seen:
            self.begin_grace_period(seen)
        if self.hang is not None:
            self.tell("hang", rank=self.hang.rank, message=self.hang.message)
            self.last = time.monotonic()
            if self.hang.rank in self.hang.pages:
                kill_rank(self.hang.pages[self.hang.rank])  # the others then lose it, and end
                self.last += SECONDS_AFTER_HANG

    def tell(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # a full disk must not end the run
            self.log.write(kind, **fields)

    def made_progress(self) -> bool:
        """Whether this attempt published anything: that is always beyond where it began."""
        return any(entry.attempt == self.lease.attempt for entry in list_published(open_run_store(self.folder)))

    def incident(self, failed: RanksFailed, before: list[Incident]) -> Incident:
        """Written down, and judged by what came before in this job."""
        first = failed.first
        if self.hang is not None:
            first = next((f for f in failed.failures if f.rank == self.hang.rank), first)
            first = replace(first, message=self.hang.message, traceback=self.hang.stack, secondary=False, exit_code=8)
            failed.failures = [first, *(f for f in failed.failures if f.rank != first.rank)]
        pages = self.hang.pages if self.hang is not None else read_heartbeats(self.folder, self.lease.attempt)
        incident = build_incident(self.folder, self.lease.attempt, first, newest_checkpoint_step(self.folder), pages)
        if self.hang is not None:
            incident = replace(incident, outcome="hang")
        elif (odd := find_collective_mismatch(pages)) is not None:
            incident = replace(incident, message=f"{odd[1]}; then {incident.message}")
        failed.failures[0] = replace(first, step=incident.step)
        for page in pages.values():  # one that came too late to be looked at
            if page.signal:
                self.begin_grace_period(page.signal)
        stopped = first.error_type == StoppedBySignal.__name__
        incident = replace(incident, outcome="stopped") if stopped else assign_verdict(incident, before)
        with suppress(OSError):  # on a full disk the failure itself is still told
            incident.write(self.folder)
        return incident


class GracePeriodExpired(MeshwrightError):
    """A signal's grace was too short for a checkpoint; the last periodic one stands."""

    def __init__(self, number: int, grace: float, step: int) -> None:
        stands = f"the checkpoint of step {step} stands" if step >= 0 else "there is no checkpoint"
        super().__init__(f"signal {number}: the ranks did not end within {grace:g} s and were killed; {stands}")
        self.exit_code = 128 + number


def record_lost_attempts(folder: RunFolder, now: int) -> None:
    """An attempt whose supervisor died left no word: its pages say where its ranks were."""
    for attempt, lease in list_leases(open_run_store(folder)):
        if attempt < now and not folder.incident(attempt).exists():
            ranks = [{"rank": rank, "where": page.location} for rank, page in read_heartbeats(folder, attempt).items()]
            message = f"process {lease.get('pid')} on {lease.get('host')} ended without a word"
            Incident(attempt, "lost", message=message, ranks=ranks, checkpoint=newest_checkpoint_step(folder)).write(
                folder
            )


def newest_checkpoint_step(folder: RunFolder) -> int:
    return next((entry.step for entry in list_published(open_run_store(folder)) if entry.manifest is not None), -1)


def kill_rank(page: HeartbeatReading) -> None:
    """Kills the rank that a page is of, if it is still that one."""
    if page.is_alive:
        with suppress(ProcessLookupError):
            os.kill(page.pid, signal.SIGKILL)


def describe_location(incident: Incident) -> str:
    if incident.rank is None:
        return "the process that starts the ranks"
    step = f", step {incident.step}" if incident.step is not None else ""
    return f"rank {incident.rank}{step}, {incident.phase}"


def warn(text: str) -> None:
    with suppress(OSError, ValueError):  # whoever was reading has left; the run goes on
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
