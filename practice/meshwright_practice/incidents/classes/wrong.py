"""Incidents in which a job trains on, and the result is not what its owner believes. Torch-free."""

from __future__ import annotations

from math import log
from random import Random

from meshwright_practice.incidents.classes.settings import around, custom, decoder, ranks_of
from meshwright_practice.incidents.incident import (
    Arrangement,
    DamageCheckpoint,
    DeleteCheckpoints,
    IncidentClass,
    Move,
    TrainRun,
)

LONGER = (
    "The owner has extended this training job, and says that it is not as far as it should be after the time that it "
    "has run. The steps look as fast as before. Find out where the steps went, and what to do before the next "
    "extension."
)
"""What the pager says of jobs that lose work between two commands."""
VOCABULARY = 64
"""Tokens of the data of jobs with a model of their own; `parts.py` reads it."""


def draw_replay(dice: Random, steps: int) -> Arrangement:
    ranks, every = ranks_of(dice), max(4, steps // 10)
    kept = every * dice.choice((1, 2))
    first = kept + every * dice.choice((2, 3))
    settings = (*decoder(dice, steps, ranks), f"--checkpoint.every={every}", "--checkpoint.mode=sync")
    acts = (TrainRun((*settings, f"--steps={first}")), DeleteCheckpoints(kept), TrainRun(settings))
    values = {"step": kept, "end": first, "again": first - kept, "ranks": ranks}
    return Arrangement(acts, None, around(kept), values)


def draw_corrupt_checkpoint(dice: Random, steps: int) -> Arrangement:
    ranks, every = ranks_of(dice), max(4, steps // 10)
    rank, damaged = dice.randrange(ranks), every * dice.choice((3, 4, 5))
    shard = "--layout.shard=parameters"  # every rank has a shard of its own
    settings = (*decoder(dice, steps, ranks), shard, f"--checkpoint.every={every}", "--checkpoint.mode=sync")
    acts = (TrainRun((*settings, f"--steps={damaged}")), DamageCheckpoint(rank), TrainRun(settings))
    values = {"step": damaged, "restored": damaged - every, "ranks": ranks}
    return Arrangement(acts, rank, (damaged - every, damaged + 1), values)


def draw_other_settings(dice: Random, steps: int) -> Arrangement:
    ranks, every = ranks_of(dice), max(4, steps // 10)
    end = every * dice.choice((3, 4))
    key, before, after = dice.choice(
        (("seed", 11, 12), ("optimizer.lr", 0.001, 0.003), ("batch.global", 12, 24), ("data.sequence", 32, 64))
    )
    settings = (*decoder(dice, steps, ranks), f"--checkpoint.every={every}", "--checkpoint.mode=sync")
    acts = (
        TrainRun((*settings, f"--{key}={before}", f"--steps={end}")),
        TrainRun((*settings, f"--{key}={after}")),
    )
    values = {"step": end, "key": key, "before": before, "after": after, "ranks": ranks}
    return Arrangement(acts, None, around(end), values)


def draw_wrong_normalisation(dice: Random, steps: int) -> Arrangement:
    ranks = ranks_of(dice)
    act = TrainRun(custom(steps, ranks), "", "sequences")
    return Arrangement((act,), None, (0, 2), {"step": 0, "vocabulary": VOCABULARY, "uniform": f"{log(VOCABULARY):.3f}"})


def draw_bit_flip(dice: Random, steps: int) -> Arrangement:
    ranks, step = 3, dice.randint(steps // 8 + 3, steps // 3)  # of two replicas, nobody can tell which one is wrong
    rank, every = dice.randrange(ranks), dice.choice((5, 8))
    settings = (*decoder(dice, steps, ranks), f"--numerics.compare_every={every}")
    act = TrainRun(settings, f"step.fetch:rank{rank}:flip@step{step}")
    return Arrangement((act,), rank, (step - 1, step + every + 1), {"step": step, "every": every, "ranks": ranks})


WRONG_CLASSES = (
    IncidentClass(
        name="replay",
        meaning="samples were trained again, because newer checkpoints were gone",
        draw=draw_replay,
        page=LONGER,
        fix="keep-checkpoints",
        story="The first command trains {end} steps. A clean-up of the disk then deletes every checkpoint after step "
        "{step}. The second command resumes there, and trains {again} steps for the second time.",
        evidence=(r"again", r"redo", r"checkpoint of step", r"replay"),
        cause="replay",
        shown_by="meshwright diagnose and meshwright checkpoint list: steps that two attempts have completed",
        hints=(
            "Compare where one attempt ended with where the next one began.",
            "Which checkpoints were published, and which exist? Try meshwright checkpoint list.",
            "The second attempt begins again at step {step}.",
        ),
        path=(
            Move(
                "the step number lies behind the time that the job has run",
                "steps are fast enough, so that some of them were trained twice",
                "compare the end of one attempt with the beginning of the next",
            ),
            Move(
                "the next attempt began before the newest checkpoint that was published",
                "that checkpoint was deleted or damaged between the two",
                "find out who deletes checkpoints: retention belongs to the job (checkpoint.keep)",
            ),
        ),
        read=("card what-survives-a-restart", "handbook/data-and-resume.md#what-must-survive-a-restart"),
    ),
    IncidentClass(
        name="corrupt-checkpoint",
        meaning="a checkpoint is damaged, and the job fell back to an older one",
        draw=draw_corrupt_checkpoint,
        page=LONGER,
        fix="check-the-storage",
        story="One byte of the shard of rank {rank} in the checkpoint of step {step} is inverted, as bad storage "
        "does. The next command finds that its digest is wrong, says so, and falls back to step {restored}.",
        evidence=(r"DAMAGED", r"damage", r"expected .* found", r"fall"),
        cause="replay",
        shown_by="meshwright checkpoint verify: the file, and the digest that was expected and found. "
        "meshwright diagnose says that steps were trained again, and asks for this command",
        hints=(
            "Compare where one attempt ended with where the next one began.",
            "The newest checkpoint exists and was not used. Is it intact?",
            "Run meshwright checkpoint verify on the run folder: the name of the file tells the rank.",
        ),
        path=(
            Move(
                "steps were trained again, although a newer checkpoint is there",
                "the newer checkpoint was refused",
                "verify it: meshwright checkpoint verify RUN",
            ),
            Move(
                "one chunk of one file has another digest",
                "the bytes changed after they were written: the digest is taken from memory",
                "check the storage of that host, keep the older checkpoint, and verify the others",
            ),
        ),
        read=("card recoverable-checkpoint", "handbook/failure-plane.md#the-dangerous-silent-ones"),
    ),
    IncidentClass(
        name="other-settings",
        meaning="the job was continued with settings that change its numbers, and was refused",
        draw=draw_other_settings,
        page=LONGER,
        fix="restore-settings",
        story="The run began with {key} = {before}. The second command has {key} = {after}, which is part of the "
        "identity of the run, so that it is refused before it trains a step.",
        evidence=(r"{key}", r"identity"),
        cause="crash",
        shown_by="job.log and attempts/: both values of the setting",
        hints=(
            "When did the last step arrive, and did the second command train at all?",
            "Read the end of job.log: the second command says why it stopped.",
            "Compare the settings of the run with those of the second command.",
        ),
        path=(
            Move(
                "no step after the extension",
                "the second command did not crash in training: it was refused",
                "read its message and its exit code, 3",
            ),
            Move(
                "the message names a setting with two values",
                "a setting that changes the numbers makes another run of it",
                "restore the setting; or decide for a new timeline with --fork, and say so in the report",
            ),
        ),
        read=("card trap-short-list-of-restart-state", "handbook/data-and-resume.md#identity-and-placement"),
    ),
    IncidentClass(
        name="wrong-normalisation",
        meaning="the loss is divided by the wrong number of tokens",
        draw=draw_wrong_normalisation,
        page="A team trains its own model with its own loss. The loss falls, but it is higher than that of everybody "
        "else, from the first step on. The model starts with uniform outputs over {vocabulary} tokens. Find out why.",
        fix="token-normalisation",
        story="The loss is the mean over the valid tokens of each sequence, times its length, so that a token of a "
        "short sequence counts more than one of a long sequence. A batch is still the sum of its samples, which is "
        "all that the check of the first batch can know; but the sum divided by the valid tokens of the step is no "
        "mean over tokens.",
        evidence=(r'"step":0\b.*"loss"', r"\b1 of \d+ steps done"),
        cause="",
        shown_by="the record of step 0 in events/rank-00000.jsonl: its loss against ln({vocabulary}) = {uniform}. "
        "meshwright diagnose cannot know what a loss should be",
        hints=(
            "Nothing here is slow or broken. What must the loss of an untrained model be?",
            "A uniform guess over {vocabulary} tokens has a loss of ln {vocabulary} = {uniform}.",
            "The record of step 0 has the loss, the positions and the valid targets. Multiply.",
        ),
        path=(
            Move(
                "the loss of the first step is above ln(vocabulary)",
                "an untrained model cannot be worse than uniform by that much: the division is wrong",
                "compare loss x valid targets with loss x positions",
            ),
            Move(
                "loss / ln(vocabulary) = positions / valid targets",
                "the sum counts padding, or weighs sequences instead of tokens",
                "return the sum over valid tokens; the step divides it once by their global count",
            ),
        ),
        read=("card trap-mean-of-means", "handbook/data-parallelism.md#gradients-in-pytorch"),
        par=420.0,
    ),
    IncidentClass(
        name="bit-flip",
        meaning="the parameters of one replica differ from the others",
        draw=draw_bit_flip,
        page="This training job has ended, and its owner says that the code has been in use for months and that every "
        "host passed its checks. A restart might work. Find out what ended it and where, before somebody does that.",
        fix="replace-host",
        story="One bit of a parameter of rank {rank} changes before step {step}, as a defective memory cell or core "
        "does. The replicas are compared every {every} steps, and one of them differs.",
        evidence=(r"replica", r"differ", r"rank {rank}\b"),
        cause="crash",
        shown_by="meshwright diagnose and attempts/0001/incident.json: the ranks that agree, and the one that does not",
        hints=(
            "Read the message with which the job ended.",
            "The ranks compare their parameters. Which of them agree?",
            "Two of three ranks have the same digest.",
        ),
        path=(
            Move(
                "the job stops itself, without an exception of the model",
                "replicas that must be equal bit for bit are not",
                "see which ranks agree with each other",
            ),
            Move(
                "one rank differs from all others",
                "neither code nor data can do that to a single replica: the hardware did",
                "take the host of that rank out of service, and continue from a checkpoint before the flip",
            ),
        ),
        read=("card most-dangerous-silent-failure", "handbook/failure-plane.md#the-dangerous-silent-ones"),
    ),
)
