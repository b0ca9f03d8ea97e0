"""Incidents in which a job stops, restarts or refuses to continue. Torch-free."""

from __future__ import annotations

from random import Random

from meshwright.base.history.run_history import RunHistory
from meshwright_practice.incidents.classes.settings import (
    around,
    custom,
    decoder,
    hang_timeout,
    moment,
    ranks_of,
    sizes,
)
from meshwright_practice.incidents.incident import Arrangement, IncidentClass, Move, TrainOnHosts, TrainRun

ENDED = (
    "The scheduler reports that this training job has failed, or will within minutes; the owner has only seen that no "
    "new steps arrive. Find out what ended it and on which rank, before somebody restarts it blindly."
)
"""What the pager says of every job that ends."""
WARM_UP_PASSES = 2
"""Forward passes of a model of one's own before its first step, at least; ranks differ in one."""
HANGS = {
    "hang": "sleeps and never returns",
    "stop": "is stopped by a signal, as a debugger or a cgroup freezer does",
}
HANG_PHASES = ("collective", "forward", "backward", "update")


def failed_step(history: RunHistory) -> int | None:
    """The step in which the first attempt failed, or those that it had completed if the incident names none."""
    if not history.attempts or history.attempts[0].incident is None:
        return None
    step = history.attempts[0].incident.step
    return history.attempts[0].done if step is None else step


def first_nonfinite_step(history: RunHistory) -> int | None:
    return min((event["step"] for event in history.nonfinite), default=None)


def draw_hang(dice: Random, steps: int) -> Arrangement:
    ranks, step = ranks_of(dice), moment(dice, steps)
    action, point, rank = dice.choice(sorted(HANGS)), dice.choice(HANG_PHASES), dice.randrange(ranks)
    settings = (*decoder(dice, steps, ranks), hang_timeout(steps))
    act = TrainRun(settings, f"step.{point}:rank{rank}:{action}@step{step}")
    values = {"step": step, "how": HANGS[action], "phase": point, "ranks": ranks}
    return Arrangement((act,), rank, around(step), values)


def draw_nan(dice: Random, steps: int) -> Arrangement:
    ranks, step = ranks_of(dice), moment(dice, steps)
    rank = dice.randrange(ranks)
    act = TrainRun(custom(steps, ranks), "", f"tokens/zero:{rank}:{step + WARM_UP_PASSES}:0")
    return Arrangement((act,), rank, around(step), {"step": step, "ranks": ranks})


def draw_out_of_memory(dice: Random, steps: int) -> Arrangement:
    ranks, step = ranks_of(dice), moment(dice, steps)
    rank, kept = dice.randrange(ranks), dice.choice((6, 8, 10))
    act = TrainRun(custom(steps, ranks), "", f"tokens/memory:{rank}:{step - kept // 2}:{kept}")
    values = {"step": step, "ranks": ranks, "kept": kept}
    return Arrangement((act,), rank, (max(0, step - kept), step + kept), values)


def draw_killed_rank(dice: Random, steps: int) -> Arrangement:
    ranks, step = ranks_of(dice), moment(dice, steps)
    rank, point = dice.randrange(ranks), dice.choice(("forward", "backward", "update"))
    settings = (*decoder(dice, steps, ranks), f"--checkpoint.every={max(5, step * 2 // 3)}", "--launch.restarts=2")
    act = TrainRun(settings, f"step.{point}:rank{rank}:kill@step{step}")
    return Arrangement((act,), rank, around(step), {"step": step, "phase": point, "ranks": ranks})


def draw_lost_host(dice: Random, steps: int) -> Arrangement:
    step, every = moment(dice, steps), max(5, steps // 12)
    hosts = (
        "--launch.hosts=2",
        "--launch.restarts=2",
        "--launch.host_timeout=10",
        "--launch.rendezvous_timeout=20",
        "--launch.min_hosts=1",
    )
    settings = (*sizes(dice.choice((64, 96)), 3, 48, 12, steps, 2), f"--checkpoint.every={every}", *hosts)
    act = TrainOnHosts(settings, "node-b", step)
    return Arrangement((act,), 1, (step, step + 40), {"step": step, "host": "node-b", "ranks": 2})


BROKEN_CLASSES = (
    IncidentClass(
        name="hang",
        meaning="a rank makes no progress, and the others wait for it",
        draw=draw_hang,
        page=ENDED,
        fix="find-the-stack",
        story="At step {step}, rank {rank} {how}. Its peers wait in the next collective, and none of them can tell "
        "why.",
        evidence=(r"rank {rank}\b", r"\bhang", r"waiting in"),
        cause="hang",
        shown_by="meshwright diagnose, and meshwright watch while it lasts: the heartbeat of every rank",
        hints=(
            "Look at the run while nothing moves: meshwright watch --once shows where every rank is.",
            "Most ranks wait in a collective. Which one has not arrived there, or is in another one?",
            "It happens at step {step}; attempts/0001/incident.json lists the collectives of all ranks.",
        ),
        path=(
            Move(
                "no new steps, and no error",
                "a collective waits for a rank; a timeout names the waiting ranks, which are not the cause",
                "compare the heartbeats: step, phase, and the number of collectives entered",
            ),
            Move(
                "one rank is behind, or in another collective",
                "that rank is the cause, and its stack says where it is",
                "read its stack; make every rank call the same collectives in the same order",
            ),
        ),
        read=("card failures-of-multi-node-training", "handbook/failure-plane.md#a-hang-step-by-step"),
    ),
    IncidentClass(
        name="nan",
        meaning="the loss or a gradient of one rank is not finite",
        draw=draw_nan,
        page=ENDED,
        fix="replay-the-step",
        story="From a step on, the model of rank {rank} divides by a sum that is zero. The sum over ranks "
        "spreads the NaN to every gradient, so that all ranks see it and only one has caused it.",
        evidence=(r"finite", r"nan\b"),
        cause="numerics",
        shown_by="meshwright diagnose, and the record `nonfinite` of events/: it names the module and the rank",
        hints=(
            "Read the exit code and the last message of the job in job.log.",
            "After an all-reduce every rank has the bad value. Which rank had it before?",
            "A record `nonfinite` of one of the ranks names the first module that is not finite.",
        ),
        path=(
            Move(
                "all ranks stop at the same step with the same message",
                "a sum over ranks spreads a NaN, so that the step is known and the rank is not",
                "find the first module that is not finite, before any collective",
            ),
            Move(
                "one rank names a module of its own forward pass",
                "its samples or its device are the cause",
                "run that step again in detail: meshwright replay RUN --step K",
            ),
        ),
        read=("card fp16-produces-nan", "handbook/numerics.md#nan-in-float16"),
        observed_step=first_nonfinite_step,
    ),
    IncidentClass(
        name="out-of-memory",
        meaning="one rank runs out of memory, while the others have enough",
        draw=draw_out_of_memory,
        page=ENDED,
        fix="release-references",
        story="The model of rank {rank} keeps a reference to a large tensor in every step, and "
        "{kept} of them fit into it. Its memory grows until an allocation fails; the memory of the other ranks does "
        "not.",
        evidence=(r"memor", r"alloc"),
        cause="crash",
        shown_by="meshwright diagnose and attempts/0001/incident.json: the error of the rank that failed first",
        hints=(
            "Which rank failed first, and with which error? The others only lost their peer.",
            "Read the log of that rank in attempts/0001/.",
            "Compare the memory of that rank with the memory of its peers, step by step.",
        ),
        path=(
            Move(
                "several ranks report errors",
                "most of them report that a peer has left; the first failure is the cause",
                "read attempts/0001/incident.json, which orders the failures",
            ),
            Move(
                "one rank cannot allocate, with the same model and batch as its peers",
                "its memory grows: something keeps references, or its samples are larger",
                "find what holds them; do not only lower the batch",
            ),
        ),
        read=("card failures-of-multi-node-training", "handbook/memory.md#which-remedy-for-which-class"),
        observed_step=failed_step,
    ),
    IncidentClass(
        name="killed-rank",
        meaning="the process of one rank was killed from outside, and the job restarted",
        draw=draw_killed_rank,
        page="The owner of this training job says that it went back to a step that it had already passed, and lost "
        "minutes. The scheduler has no record of a failure. Find out what happened, where, and whether it will again.",
        fix="check-the-host",
        story="SIGKILL ends rank {rank} in {phase} of step {step}, as the kernel's out-of-memory killer or an operator "
        "does. The supervisor restarts all ranks from the newest checkpoint.",
        evidence=(r"SIGKILL", r"rank {rank}\b", r"infrastructure"),
        cause="crash",
        shown_by="meshwright diagnose and attempts/0001/incident.json: the rank that failed first, without a traceback",
        hints=(
            "How many attempts does the run have, and how did the first one end?",
            "A rank that raises an error leaves a traceback. What does it mean that there is none?",
            "attempts/0001/incident.json names the rank and the signal.",
        ),
        path=(
            Move(
                "steps are trained twice",
                "an attempt ended, and the next one began at the newest checkpoint",
                "read why the attempt ended: attempts/0001/incident.json",
            ),
            Move(
                "a rank ended by SIGKILL, without a traceback",
                "nothing in the program did that: the kernel, the scheduler or an operator did",
                "look at dmesg and the log of the scheduler on the host of that rank",
            ),
        ),
        read=("card cost-of-a-kill", "handbook/failure-plane.md#the-failure-model"),
    ),
    IncidentClass(
        name="lost-host",
        meaning="a host left the job with all of its ranks",
        draw=draw_lost_host,
        page="This training job runs on two hosts. Its throughput has halved, and the owner asks whether the result is "
        "still right. Find out what happened, which ranks it concerned, and what to do.",
        fix="replace-host",
        story="The processes of host {host} are killed after step {step}, as by a power failure. The leader notices "
        "that the connection has ended, and continues from the newest checkpoint with the hosts that are left.",
        evidence=(r"host {host}", r"is lost", r"hosts"),
        cause="crash",
        shown_by="meshwright diagnose and attempts/0001/incident.json: the host and its ranks",
        hints=(
            "How many attempts does the run have, and how many ranks has each of them?",
            "Read why the first attempt ended: a rank, or everything on a host?",
            "attempts/0001/incident.json names the host and its ranks.",
        ),
        path=(
            Move(
                "fewer tokens per second, after a gap",
                "the newest attempt has fewer ranks than the first one",
                "compare the start records of the attempts",
            ),
            Move(
                "the incident names a host",
                "the global batch and the order of samples are the same on fewer ranks, so that the result is right",
                "bring the host back or give the job a spare; it resizes at the next checkpoint",
            ),
        ),
        read=("card failures-of-multi-node-training", "handbook/failure-plane.md#how-jobs-fail"),
        par=420.0,
        observed_step=failed_step,
    ),
)
