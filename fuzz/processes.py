"""Episodes with several processes: signals to a running job, and two jobs on one run folder."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from fuzz.configs import Tree
from fuzz.episode import Episode
from fuzz.jobs import Job, children
from fuzz.oracle import check_same, expect
from fuzz.training import COLD
from meshwright.base.records.run_folder import RunFolder

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def kill(episode: Episode) -> None:
    """After signals to the supervisor, a rank or the fork server at any moment, the run continues to the same state."""
    rng = episode.rng
    tree = episode.draw()
    reference = episode.reference(tree)
    args = episode.train_args(tree)
    told: list[str] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        cold = rng.random() < COLD
        attempts = RunFolder(episode.run_folder).last_attempt()
        delay = rng.uniform(0.0, 1.1 * reference.seconds + (3.0 if cold else 0.0))
        number = rng.choice(SIGNALS)
        target = rng.choice(["supervisor", "rank", "fork server"] if cold else ["supervisor", "rank"])
        repeats = rng.choice([1, 1, 1, 2])  # the second signal kills the ranks
        told.append(f"{repeats} {signal.Signals(number).name} to {target} after {delay:.1f} s")
        episode.result = ", ".join(told)
        job = episode.start(args, cold=cold)
        job.is_running(delay)
        for _ in range(repeats):
            send(job, target, number, cold)
            job.is_running(rng.uniform(0.0, 0.3))
        started = RunFolder(episode.run_folder).last_attempt() > attempts
        episode.finish(job, kill_codes(target, number, started))
        episode.counts["kills"] += 1
    episode.counts["resumes"] += 1
    ended = episode.run(args)
    check_same(episode.outcome(ended), reference.outcome)


def send(job: Job, target: str, number: int, cold: bool) -> None:
    """Sends a signal to the supervisor, to the first rank or to the fork server of a job, if it runs."""
    if target == "supervisor":
        job.signal(number)
        return
    launchers = children(job.pid) if cold else [job.pid]
    victims = launchers if target == "fork server" else [rank for pid in launchers for rank in children(pid)]
    for pid in victims[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_codes(target: str, number: int, started: bool) -> tuple[int, ...]:
    """The exit codes that a signal may cause. 0: it came at the end, or the job restarted."""
    if number == signal.SIGKILL:
        return (0, -number) if target == "supervisor" else (0,)
    # Before the first attempt has a lease, no handler is set yet.
    return (0, 128 + number) if started else (0, 128 + number, -number)


def two_at_once(episode: Episode) -> None:
    """Of two jobs on one folder, one trains; the other one exits with 9, or runs after it."""
    rng = episode.rng
    tree = episode.draw()
    reference = episode.reference(tree)
    args = episode.train_args(tree)
    variant = rng.choice(["resume", "resume", "fresh", "read"])
    if rng.random() < 0.5 and variant != "fresh":
        step = rng.randrange(1, tree["steps"])
        episode.run(args, (0, 143), fault=f"step.fetch:rank0:term@step{step}")
        episode.counts["resumes"] += 1
    first = episode.start(args, fault="step.fetch:slow=0.1", cold=rng.random() < COLD)
    if variant == "read":
        read_beside(episode, first, tree)
    else:
        first.is_running(rng.choice([0.0, rng.uniform(0.0, 0.2), rng.uniform(0.0, 1.2 * reference.seconds)]))
        second = episode.start([*args, "--fresh"] if variant == "fresh" else args, fault="step.fetch:slow=0.1")
        codes = second.wait(60.0).code, first.wait(60.0).code
        episode.result = f"{variant}: exit {codes[1]} and {codes[0]}"
        expect(0 in codes, "one of two jobs completes the run", codes)
        episode.finish(second, (0, 9))
    episode.finish(first, (0, 9))
    ended = episode.run(args)
    check_same(episode.outcome(ended), reference.outcome)


def read_beside(episode: Episode, job: Job, tree: Tree) -> None:
    """Runs verbs that read the folder while the job saves and deletes checkpoints."""
    rng, run, count = episode.rng, str(episode.run_folder), 0
    readers = [
        ["checkpoint", "list", run],
        ["checkpoint", "verify", run],
        ["checkpoint", "digest", run],
        ["report", run],
        ["data", "show", run, "--step", str(rng.randrange(tree["steps"]))],
    ]
    while not episode.run_folder.exists() and job.is_running(0.02):
        pass
    while job.is_running() and count < 8:
        ended = episode.run(rng.choice(readers), (0, 2, 4))
        expect("DAMAGED" not in ended.output, "no damaged checkpoint while retention deletes", ended.output[-500:])
        count += 1
    episode.result = f"read {count} times"
