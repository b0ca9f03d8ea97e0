"""Incidents in which a job trains correctly, and too slowly. Torch-free."""

from __future__ import annotations

from random import Random

from meshwright_practice.incidents.classes.settings import around, custom, decoder, onset, ranks_of, sizes
from meshwright_practice.incidents.incident import Arrangement, IncidentClass, Move, TrainRun

SLOWER = (
    "The owner of this training job says that it delivers fewer tokens per second than the same job did last week. "
    "The loss looks normal. Nobody has changed the model. Find out what costs the time."
)
"""What the pager says of every slow job: the symptom is the same, the causes are not."""
LOOK = "Run meshwright diagnose and meshwright watch --once on the run folder, and read which phase takes the time."


def draw_straggler(dice: Random, steps: int) -> Arrangement:
    ranks, first = ranks_of(dice), onset(dice, steps)
    rank, phase = dice.randrange(ranks), dice.choice(("fetch", "forward", "backward"))
    seconds = dice.choice((0.06, 0.08, 0.1))
    own = phase != "fetch" and dice.random() < 0.3
    settings = custom(steps, ranks) if own else decoder(dice, steps, ranks)
    act = TrainRun(settings, f"step.{phase}:rank{rank}:slow={seconds}@step{first}+", "tokens" if own else "")
    return Arrangement((act,), rank, around(first), {"step": first, "phase": phase, "seconds": seconds, "ranks": ranks})


def draw_data_bound(dice: Random, steps: int) -> Arrangement:
    ranks, first, seconds = ranks_of(dice), onset(dice, steps), dice.choice((0.05, 0.07, 0.09))
    act = TrainRun(decoder(dice, steps, ranks), f"step.fetch:slow={seconds}@step{first}+")
    return Arrangement((act,), None, around(first), {"step": first, "seconds": seconds, "ranks": ranks})


def draw_bubble(dice: Random, steps: int) -> Arrangement:
    stages, micro, batch = dice.choice(((2, 4, 8), (2, 8, 16), (3, 4, 12)))
    layers = 6 if stages == 3 else 4
    pipeline = ("--layout.replicate=1", f"--layout.pipeline={stages}", f"--batch.micro={micro}")
    act = TrainRun((*sizes(128, layers, 64, batch, steps, stages), *pipeline))
    return Arrangement((act,), None, None, {"stages": stages, "micro": micro, "chunks": batch // micro, "batch": batch})


def draw_slow_checkpoints(dice: Random, steps: int) -> Arrangement:
    ranks, every = ranks_of(dice), max(5, steps // dice.choice((8, 10)))
    seconds = dice.choice((0.015, 0.025))
    settings = (*decoder(dice, steps, ranks), f"--checkpoint.every={every}", "--checkpoint.mode=sync")
    act = TrainRun(settings, f"save.write:slow={seconds}")
    return Arrangement((act,), None, around(every), {"step": every, "every": every, "seconds": seconds, "ranks": ranks})


SLOW_CLASSES = (
    IncidentClass(
        name="straggler",
        meaning="one rank is slower than the others, and they wait for it",
        draw=draw_straggler,
        page=SLOWER,
        fix="replace-host",
        story="Rank {rank} sleeps {seconds} s in {phase} from step {step} on, as on a host whose clock is throttled or "
        "whose cores another process uses. The collectives make every other rank wait for it.",
        evidence=(r"rank {rank}\b", r"straggler", r'"rank":{rank},.*"phases"'),
        cause="straggler",
        shown_by="meshwright diagnose: the local seconds of the rank against the median of its peers",
        hints=(
            LOOK,
            "Compare the ranks with each other: the time that a rank spends by itself, without its waits.",
            "The loss of time is in {phase}, and only one rank has it; the others wait in collectives.",
        ),
        path=(
            Move(
                "every rank has long steps",
                "synchronous steps are as long as those of the slowest rank, so that all look slow",
                "compare local seconds, which leave out the waits for others",
            ),
            Move(
                "one rank is behind in nearly every step, in one phase",
                "its host or its input is slow, not the model or the layout",
                "look at clock rates, temperature, other processes and storage of that host; replace it",
            ),
        ),
        read=("card failures-of-multi-node-training", "handbook/failure-plane.md#slow-is-also-a-failure"),
    ),
    IncidentClass(
        name="data-bound",
        meaning="all ranks wait for their samples",
        draw=draw_data_bound,
        page=SLOWER,
        fix="faster-input",
        story="Every rank waits {seconds} s for its samples from step {step} on, as with a loader that decodes too "
        "much, or storage that is too slow.",
        evidence=(r"fetch", r"data: ", r"wait for their samples"),
        cause="data",
        shown_by="meshwright diagnose: the seconds in fetch of the rank that waits least",
        hints=(
            LOOK,
            "Is one rank behind the others, or do all of them lose the same time in the same phase?",
            "All ranks spend the time before the forward pass begins.",
        ),
        path=(
            Move(
                "low utilisation on every rank alike",
                "no rank is behind its peers, so that neither a host nor a collective is to blame",
                "divide a step into its phases",
            ),
            Move(
                "fetch takes most of the step",
                "the input pipeline delivers slower than the model consumes",
                "raise data.workers, decode ahead of time, move the data to faster storage",
            ),
        ),
        read=("card why-more-devices-do-not-help", "handbook/playbook.md#symptom-interpretation-next-move"),
    ),
    IncidentClass(
        name="bubble",
        meaning="pipeline stages idle, because there are too few micro-batches",
        draw=draw_bubble,
        page=SLOWER,
        fix="more-micro-batches",
        story="The pipeline has {stages} stages, and a step has {chunks} micro-batches of {micro} samples. Nothing is "
        "broken: fill and drain of the schedule leave the stages idle for a large share of the step.",
        evidence=(r"bubble", r"micro\b", r"fill and drain"),
        cause="bubble",
        shown_by="meshwright diagnose: the bubble of the schedule; run.toml: batch.micro and layout.pipeline",
        hints=(
            "Read the layout and the batch in run.toml, and then what meshwright diagnose says.",
            "How many micro-batches does a step have, and how many stages are there?",
            "The share of the time that stages idle is (stages - 1) / (micro-batches + stages - 1).",
        ),
        path=(
            Move(
                "ranks idle in sends and receives, and none is behind its peers",
                "stages of a pipeline wait for each other by design when a step begins and ends",
                "compute the bubble: (stages - 1) / (micro-batches + stages - 1)",
            ),
            Move(
                "the measured idle share is that of the formula",
                "the schedule is the cause, not a slow stage",
                "use more micro-batches, an interleaved schedule, or fewer stages",
            ),
        ),
        read=("card bubble-fraction", "handbook/pipeline.md#the-bubble"),
    ),
    IncidentClass(
        name="slow-checkpoints",
        meaning="training waits for checkpoints",
        draw=draw_slow_checkpoints,
        page=SLOWER,
        fix="asynchronous-saves",
        story="Every write to a checkpoint takes {seconds} s longer than it should, and checkpoint.mode = sync makes "
        "training wait for all of them, every {every} steps.",
        evidence=(r"checkpoint", r"save", r"sync"),
        cause="checkpoint",
        shown_by="meshwright diagnose: the seconds between steps that training waited for saves",
        hints=(
            "Compare the time of a step with the time from one step to the next.",
            "The steps themselves are as fast as ever. What happens between some of them?",
            "The time is lost every {every} steps.",
        ),
        path=(
            Move(
                "tokens per second are low, and steps are not longer than before",
                "the time is lost between steps: evaluation, callbacks or checkpoints",
                "look at the gaps between steps, and at which steps they follow",
            ),
            Move(
                "the gaps follow the checkpoints",
                "saves are synchronous, and the disk is slow",
                "save asynchronously, save less often, or write to a faster disk",
            ),
        ),
        read=("card recoverable-checkpoint", "handbook/failure-plane.md#saving"),
    ),
)
