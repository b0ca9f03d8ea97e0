"""The supervisor: starts attempt after attempt until the run is complete or another attempt cannot help. Torch-free.

The supervisor holds the lease of the run folder, watches the ranks from outside, records why each attempt ended, and
decides whether to restart the job from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from meshwright.base.checkpoint.listing import list_leases, list_published, open_run_store
from meshwright.base.environment import stop_signals
from meshwright.base.records.attempt_files import has_ended, write_incident
from meshwright.base.records.events import EventLog
from meshwright.base.records.failures import FINAL_EXIT_CODES, AttemptResized, RanksFailed
from meshwright.base.records.heartbeat import HeartbeatReading
from meshwright.base.records.incidents import (
    NO_SAMPLES,
    Incident,
    SamplesInStep,
    assign_verdict,
    build_incident,
    read_heartbeats,
    read_incidents,
)
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.lease import Lease, acquire_lease, acquire_next_lease
from meshwright.core.recover.running_ranks import RunningRanks, StartAttempt, Viewer
from meshwright.core.recover.watchdog import Hang, Watchdog, find_collective_mismatch
from meshwright.errors import KilledBySignal, MeshwrightError, RestartsExhausted, StoppedBeforeStart, StoppedBySignal

if TYPE_CHECKING:
    from meshwright.base.config import LaunchConfig

CHECK_INTERVAL = 0.5
"""Seconds between two checks of the heartbeats."""
SECONDS_AFTER_HANG = 20.0
"""Seconds that the other ranks have to end after the hung rank was killed."""


def supervise(
    folder: RunFolder,
    launch: LaunchConfig,
    start: StartAttempt,
    make_viewer: Callable[[int], Viewer],
    *,
    fresh: bool = False,
    lease: Lease | None = None,
    received: list[int] | None = None,
    report: Callable[[str], None] | None = None,
    raise_on_signal: bool = False,
    command_started: float | None = None,
    on_give_up: Callable[[int], None] = lambda _attempt: None,
    close: Callable[[], None] = lambda: None,
    samples_in_step: SamplesInStep = NO_SAMPLES,
) -> Any:
    """Runs a job to its end and returns its summary. After a failure the whole job restarts from the newest checkpoint,
    at most `launch.restarts` times in a row without publishing a new checkpoint. A job that completes in spite of a
    signal returns, unless `raise_on_signal` is set. `command_started` is the Unix time at which the user started the
    command, which is recorded; by default the present time. `on_give_up` gets the number of the last attempt of a job
    that ends with a failure, and `close` ends what has started the ranks. `samples_in_step` finds the samples that an
    incident names. A job on several hosts has acquired its `lease` already, and collects signals of all hosts in
    `received`.
    """
    command_started = time.time() if command_started is None else command_started
    lease = lease or acquire_lease(folder, fresh=fresh)
    try:
        with received_signals() if received is None else nullcontext(received) as received:
            try:
                report = report or warn
                summary = run_attempts(
                    folder,
                    launch,
                    lease,
                    start=start,
                    make_viewer=make_viewer,
                    report=report,
                    received=received,
                    command_started=command_started,
                    samples_in_step=samples_in_step,
                )
            except MeshwrightError:
                on_give_up(folder.last_attempt())
                raise
    finally:
        close()
        record_command_end(folder)
    if raise_on_signal and received:
        raise StoppedBySignal(received[0], newest_checkpoint_step(folder))
    return summary


def record_command_end(folder: RunFolder) -> None:
    """Records when the command has nothing left to do, if its last attempt is still the newest one."""
    lease = Lease(folder, folder.last_attempt())
    with suppress(OSError, MeshwrightError):
        if not lease.is_lost:
            log = EventLog(folder.root / "events" / "supervisor.jsonl", lease.attempt, -1)
            log.write("command_end")
            log.close()


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collects the signals that stop the job until it ends, so that one between two attempts stops it as well. Only the
    main thread can handle signals.
    """
    received: list[int] = []
    numbers = stop_signals() if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_attempts(
    folder: RunFolder,
    launch: LaunchConfig,
    lease: Lease,
    *,
    start: StartAttempt,
    make_viewer: Callable[[int], Viewer],
    report: Callable[[str], None],
    received: list[int],
    command_started: float,
    samples_in_step: SamplesInStep,
) -> Any:
    """Runs attempts until one completes the job, and returns its summary. `received` collects signals."""
    restart = lease.restart
    history, restarts_without_progress = earlier_attempts(folder, lease)
    while True:
        record_lost_attempts(folder, lease.attempt)
        attempt = Attempt(folder, launch, lease, start, make_viewer, received, samples_in_step)
        try:
            summary = attempt.run(restart, command_started)
            lease.raise_if_lost()
            complete = Incident(lease.attempt, "complete", checkpoint_step=newest_checkpoint_step(folder))
            write_incident(folder, complete)
            return summary
        except RanksFailed as failed:
            lease.raise_if_lost()
            incident = attempt.record_incident(failed, history)
            history.append(incident)
            if received:  # the signal may have come together with the end of the last rank
                attempt.begin_grace_period(received[0])
            if attempt.signal_number:  # the job was asked to stop: it does not restart, even if it failed on the way
                failed.exit_code = 128 + attempt.signal_number
                write_incident(folder, replace(incident, signal=attempt.signal_number))
                raise
            restarts_without_progress = 0 if attempt.made_progress() else restarts_without_progress
            try:
                raise_if_final(failed, incident, restarts_without_progress, launch.restarts)
            except MeshwrightError as given_up:  # no other host of the job tries again
                write_incident(folder, replace(incident, gave_up=given_up.exit_code))
                raise
            restart, restarts_without_progress = restart + 1, restarts_without_progress + 1
            reason = f"{describe_location(incident)}: {incident.message.splitlines()[0]}"
            step = incident.checkpoint_step
            resume_point = f"from step {step}" if step >= 0 else "from the beginning"
            report(f"attempt {lease.attempt} failed, {reason}; restart {restart}, {resume_point}")
            lease = acquire_next_lease(lease)
        except AttemptResized as resized:
            lease.raise_if_lost()
            step = newest_checkpoint_step(folder)
            write_incident(folder, Incident(lease.attempt, "resized", message=resized.message, checkpoint_step=step))
            restart += 1
            report(f"attempt {lease.attempt} has ended after step {step}: {resized.message}")
            lease = acquire_next_lease(lease)
        except MeshwrightError as error:
            lease.raise_if_lost()
            stopped = isinstance(error, (StoppedBySignal, StoppedBeforeStart, KilledBySignal, GracePeriodExpired))
            outcome = "stopped" if stopped else "failed"
            ended = Incident(lease.attempt, outcome, message=str(error), exit_code=error.exit_code)
            write_incident(folder, replace(ended, checkpoint_step=newest_checkpoint_step(folder)))
            raise


def earlier_attempts(folder: RunFolder, lease: Lease) -> tuple[list[Incident], int]:
    """The incidents of earlier attempts of the same job, and how many of the last ones in a row published nothing. A
    job on one host has none: its attempts have one supervisor.
    """
    if not lease.job or not lease.restart:
        return [], 0
    store = open_run_store(folder)
    attempts = [n for n, other in list_leases(store) if n < lease.attempt and other.get("job") == lease.job]
    published = {entry.attempt for entry in list_published(store)}
    fruitless = list(takewhile(lambda attempt: attempt not in published, attempts))
    return [incident for incident in read_incidents(folder) if incident.attempt in attempts], len(fruitless)


def raise_if_final(failed: RanksFailed, incident: Incident, restarts_without_progress: int, max_restarts: int) -> None:
    """Raises if another attempt cannot help."""
    if incident.outcome == "stopped" or failed.first.exit_code in FINAL_EXIT_CODES:
        raise failed
    if incident.verdict in ("data-dependent", "deterministic") and max_restarts:
        failed.verdict = f"{incident.verdict}: failed again {incident.when}; {incident.recommendation}"
        raise failed
    if restarts_without_progress >= max_restarts:
        if not max_restarts:
            raise failed
        raise RestartsExhausted(
            f"{max_restarts} restart(s) got no further than step {max(0, incident.checkpoint_step)}; the last failure, "
            f"{describe_location(incident)}: {incident.message}",
            f"try attempts/*/incident.json for the causes ({incident.verdict})",
        )


@dataclass
class Attempt:
    """One attempt, from the start of its ranks to the end of the last one."""

    folder: RunFolder
    launch: LaunchConfig
    lease: Lease
    start: StartAttempt
    make_viewer: Callable[[int], Viewer]
    received: list[int]
    """The signals that the job has received."""
    samples_in_step: SamplesInStep
    hang: Hang | None = None
    signal_number: int = 0
    """The signal that asked the job to stop, or 0."""
    grace_deadline: float = float("inf")
    """When the ranks are killed after a signal (monotonic clock)."""
    reported_ranks: set[int] = field(default_factory=set)
    """The ranks whose lost events have been reported."""
    hang_deadline: float = float("inf")
    """When the ranks that still run after a hang are killed (monotonic clock)."""

    def run(self, restart: int, command_started: float) -> Any:
        viewer = self.make_viewer(self.lease.attempt)
        self.log = EventLog(self.folder.root / "events" / "supervisor.jsonl", self.lease.attempt, -1, viewer.show)
        # Below the timeout of a collective: otherwise a rank that waits would fail before the hung one is found.
        hang_timeout = min(self.launch.hang_timeout, 0.8 * self.launch.collective_timeout)
        start_timeout = min(hang_timeout, self.launch.rendezvous_timeout)
        first = {"command_started": round(command_started, 6)} if restart == 0 else {}
        self.log.write("attempt_start", restart=restart, **first)
        try:
            if self.received:
                raise StoppedBeforeStart(self.received[0])
            self.ranks = ranks = self.start(self.lease.attempt, restart)
            self.watchdog = Watchdog(
                self.folder,
                self.lease.attempt,
                hang_timeout,
                self.launch.straggler_ratio,
                ranks.launcher_pid,
                start_timeout,
                ranks.read_heartbeats,
            )
            with self.lease.keep_alive():  # it starts a thread, so it must follow the fork of the ranks
                return self.wait(ranks, viewer)[0]
        finally:
            self.log.write("attempt_end")
            self.log.close()
            viewer.close()

    def wait(self, ranks: RunningRanks, viewer: Viewer) -> list[Any]:
        """Watches the ranks until they end. The first signal asks them to stop at one common step, the second one kills
        them.
        """
        forwarded = False
        last_check = time.monotonic()
        try:
            while not ranks.poll(0.1):
                viewer.tick()
                if time.monotonic() - last_check > CHECK_INTERVAL:
                    self.check_ranks()
                    last_check = time.monotonic()
                if self.received and not forwarded:
                    forwarded = True
                    self.begin_grace_period(self.received[0])
                    ranks.signal(self.received[0])
                    warn("stopping before the next step, after a checkpoint; send the signal again to kill the ranks")
                elif len(self.received) > 1:
                    ranks.kill()
                    raise KilledBySignal(self.received[-1])
                if time.monotonic() > self.hang_deadline:
                    ranks.kill()  # the process that should end the other ranks hangs as well
                if time.monotonic() > self.grace_deadline:
                    ranks.kill()
                    step = newest_checkpoint_step(self.folder)
                    raise GracePeriodExpired(self.signal_number, self.launch.grace_period, step)
            viewer.tick()
            self.report_total_of_lost_events()
        except BaseException:
            ranks.kill()
            raise
        return ranks.results()

    def begin_grace_period(self, number: int) -> None:
        if not self.signal_number:
            self.signal_number, self.grace_deadline = number, time.monotonic() + self.launch.grace_period

    def check_ranks(self) -> None:
        """Reads the heartbeats: records stragglers, and kills a rank that hangs. Raises if the run folder is gone."""
        self.lease.raise_if_lost()
        if self.hang is not None:
            return
        self.hang, stragglers, signal_number = self.watchdog.check()
        self.report_lost_events()
        for straggler in stragglers:
            self.log.write("straggler", **vars(straggler), message=str(straggler))
        if signal_number:
            self.begin_grace_period(signal_number)
        if self.hang is not None:
            self.log.write("hang", rank=self.hang.rank, message=self.hang.message)
            self.hang_deadline = time.monotonic()
            if self.hang.rank in self.hang.heartbeats:
                self.ranks.kill_rank(self.hang.rank)  # the other ranks then lose their peer and end
                self.hang_deadline += SECONDS_AFTER_HANG

    def report_lost_events(self) -> None:
        """Reports every rank that cannot write its events, once per attempt."""
        for rank, heartbeat in self.watchdog.heartbeats.items():
            if heartbeat.lost_events and rank not in self.reported_ranks:
                self.reported_ranks.add(rank)
                message = f"rank {rank} cannot write its events (is the disk full?); the training continues"
                self.log.write("events_lost", rank=rank, count=heartbeat.lost_events, message=message)

    def report_total_of_lost_events(self) -> None:
        """Reports, at the end of the attempt, the events that no rank could write any more."""
        for rank, heartbeat in self.ranks.read_heartbeats().items():
            if heartbeat.lost_events:
                message = f"the last {heartbeat.lost_events} event(s) of rank {rank} could not be written"
                self.log.write("events_lost", rank=rank, count=heartbeat.lost_events, message=message)

    def made_progress(self) -> bool:
        """Whether this attempt published a checkpoint, which is always newer than the one that it started from."""
        return any(entry.attempt == self.lease.attempt for entry in list_published(open_run_store(self.folder)))

    def record_incident(self, failed: RanksFailed, history: list[Incident]) -> Incident:
        """Writes the incident of this attempt, with the verdict that follows from the earlier ones."""
        cause = failed.first
        if self.hang is not None:
            rank = self.hang.rank
            cause = next((failure for failure in failed.failures if failure.rank == rank), replace(cause, rank=rank))
            message, stack = self.hang.message, self.hang.stack
            cause = replace(cause, message=message, traceback=stack, secondary=False, exit_code=8)
            failed.failures = [cause, *(failure for failure in failed.failures if failure.rank != rank)]
            failed.exit_code = cause.exit_code
        heartbeats = self.hang.heartbeats if self.hang is not None else self.ranks.read_heartbeats()
        checkpoint_step = newest_checkpoint_step(self.folder)
        incident = build_incident(
            self.folder, self.lease.attempt, cause, checkpoint_step, heartbeats, self.samples_in_step
        )
        if self.hang is not None:
            incident = replace(incident, outcome="hang")
        elif (mismatch := find_collective_mismatch(heartbeats)) is not None:
            incident = replace(incident, message=f"{mismatch[1]}; then {incident.message}")
        failed.failures[0] = replace(cause, step=incident.step)
        failed.rank, failed.step = cause.rank, incident.step
        for heartbeat in heartbeats.values():  # a rank may have received a signal after the last check
            if heartbeat.signal:
                self.begin_grace_period(heartbeat.signal)
        stopped = cause.error_type == StoppedBySignal.__name__
        incident = replace(incident, outcome="stopped") if stopped else assign_verdict(incident, history)
        write_incident(self.folder, incident)
        return incident


class GracePeriodExpired(MeshwrightError):
    """The ranks did not end within the grace period after a signal; the newest published checkpoint remains."""

    def __init__(self, number: int, grace_period: float, step: int) -> None:
        remaining = f"the newest checkpoint is of step {step}" if step >= 0 else "there is no checkpoint"
        super().__init__(
            f"signal {number}: the ranks did not end within {grace_period:g} s and were killed; {remaining}"
        )
        self.exit_code = 128 + number


def record_lost_attempts(folder: RunFolder, current: int) -> None:
    """Writes the incident of every earlier attempt whose supervisor was killed: the heartbeats say where its ranks
    were.
    """
    for attempt, lease in list_leases(open_run_store(folder)):
        if attempt < current and not has_ended(folder, attempt):
            heartbeats = read_heartbeats(folder, attempt)
            ranks = [{"rank": rank, "location": heartbeat.location} for rank, heartbeat in heartbeats.items()]
            message = f"process {lease.get('pid')} on {lease.get('host')} ended without writing an incident"
            step = newest_checkpoint_step(folder)
            host = str(lease.get("host", "")) if lease.get("job") else ""
            lost = Incident(attempt, "lost", message=message, ranks=ranks, checkpoint_step=step, host=host)
            write_incident(folder, lost)


def newest_checkpoint_step(folder: RunFolder) -> int:
    """The step of the newest readable checkpoint, or -1."""
    return next((entry.step for entry in list_published(open_run_store(folder)) if entry.manifest is not None), -1)


def kill_rank(heartbeat: HeartbeatReading) -> None:
    """Kills the process that wrote a heartbeat, unless its pid belongs to another process by now."""
    if heartbeat.is_alive:
        with suppress(ProcessLookupError):
            os.kill(heartbeat.pid, signal.SIGKILL)


def describe_location(incident: Incident) -> str:
    if incident.rank is None:
        return "fork server"
    host = f"host {incident.host}, " if incident.host else ""
    return f"{host}rank {incident.rank}, {incident.when}, {incident.phase}"


def warn(message: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be closed; the run continues
        print(f"meshwright: {message}", file=sys.stderr, flush=True)
