"""Follow-up questions: one per check that failed, the four questions about any pipeline, and four that press it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright_practice.cards.registry import all_cards


@dataclass(frozen=True)
class FollowUp:
    """A question, what a strong answer contains, and where to learn it."""

    question: str
    listen_for: str
    items: tuple[int, ...] = ()
    """numbers of handbook items; the cards about them are suggested"""
    page: str = ""
    """page of the documentation"""


FOLLOW_UPS: dict[str, FollowUp] = {
    "clarified": FollowUp(
        "Which of your assumptions would change the code most if it were wrong?",
        "a named assumption, and the function that it changes",
        (90, 91),
    ),
    "single_run": FollowUp(
        "What exactly is one step of your loop, and where does it begin and end?",
        "fetch, copy, forward and backward per micro-batch, then one synchronization and one update",
        (100, 106),
    ),
    "loss_falls": FollowUp(
        "How do you know that your loop learns and does not only run?",
        "a loss that falls on one process, before anything is distributed",
        (94,),
    ),
    "deterministic_run": FollowUp(
        "Two runs with one seed differ. What do you look at first?",
        "every source of randomness, and from which (seed, step, rank) it is derived",
        (82,),
        "docs/stream.md",
    ),
    "partition_deterministic": FollowUp(
        "A rank restarts and asks for its samples again. Why would it get the same ones?",
        "the order is a function of seed and epoch, not of a global generator",
        (101, 107),
        "docs/stream.md",
    ),
    "partition_union": FollowUp(
        "Which samples does nobody ever train on, and how would you notice?",
        "the union over ranks is compared with the data set",
        (101, 107),
        "docs/stream.md",
    ),
    "partition_overlap": FollowUp(
        "What does the second rank contribute if both read the same data?",
        "nothing: the mean of equal gradients is that gradient; the wrapper does not divide the input",
        (99, 124),
        "docs/stream.md",
    ),
    "partition_padding": FollowUp(
        "The data set does not divide by the number of ranks. Which samples weigh twice in your epoch?",
        "padding repeats samples; ranks may differ in length, and an incomplete batch is dropped",
        (107,),
        "docs/stream.md",
    ),
    "partition_reshuffle": FollowUp(
        "What is the order of the second epoch, and what happens if it is that of the first?",
        "the epoch enters the seed of the order; otherwise batches are always made of the same samples",
        (107,),
        "docs/stream.md",
    ),
    "sampler_used": FollowUp(
        "Where in your loop is the contract of the sampler enforced?",
        "the one line that takes indices from it",
        (101, 105),
    ),
    "two_ranks_run": FollowUp(
        "One rank takes a step more than the others. What do you see, and when?",
        "the others wait in a collective until its timeout",
        (95, 60),
        "docs/diagnose.md",
    ),
    "gradient_union": FollowUp(
        "Where is the synchronization boundary, and which single process would compute the same gradient?",
        "after accumulation, before the update; one process on the union of the samples, with one division",
        (19, 104, 135),
        "docs/prove.md",
    ),
    "sync_once": FollowUp(
        "How many bytes does a step with four accumulated backward passes reduce?",
        "as many as with one: only the last backward pass synchronizes",
        (106, 127),
    ),
    "global_batch": FollowUp(
        "You double the tensor-parallel degree on the same devices. What happens to the global batch?",
        "it halves: only the data-parallel degree multiplies samples",
        (58, 152),
    ),
    "restart_run": FollowUp(
        "What state must survive a restart, and who reads it?",
        "parameters, optimizer, scheduler, position in the data, random state, and the identity of the run",
        (102, 108),
        "docs/recovery.md",
    ),
    "resume_replay": FollowUp(
        "After your restart, which samples has the model seen twice?",
        "none: the position in the data is in the checkpoint, with the step",
        (95, 107),
        "docs/recovery.md",
    ),
    "resume_skip": FollowUp(
        "Your loader prefetches. Whose position do you save?",
        "that of the step that was trained, not that of the loader",
        (107,),
        "docs/recovery.md",
    ),
    "restart_state": FollowUp(
        "Why does the loss jump after a restart from weights alone?",
        "the moments start from zero, so the first updates have another size and direction",
        (72, 99, 108),
        "docs/recovery.md",
    ),
    "restart_manifest": FollowUp(
        "A field is missing in a checkpoint. What should load do?",
        "refuse: a silent default is another run under the same name",
        (102,),
        "docs/recovery.md",
    ),
    "config_identity": FollowUp(
        "Somebody resumes your run with another learning rate. What happens?",
        "a refusal that shows both values, before the first step",
        (108,),
        "docs/recovery.md",
    ),
    "atomic_save": FollowUp(
        "The node loses power while you save. What is on disk?",
        "the old checkpoint under its name: write elsewhere, flush, rename",
        (69, 85),
        "docs/recovery.md",
    ),
    "elastic_resume": FollowUp(
        "One of two hosts does not come back. Which samples come next?",
        "the same as before: the position is global, and the ranks divide it anew",
        (71, 107),
        "docs/stream.md",
    ),
    "rank_records": FollowUp(
        "One rank is slow. Which of your records says which?",
        "records of every rank, with rank, world size and step",
        (61, 63),
        "docs/records.md",
    ),
    "phases_timed": FollowUp(
        "A step takes twice as long as yesterday. What do you look at first?",
        "the phases of the step on every rank: the one that grew names the cause",
        (86,),
        "docs/metrics.md",
    ),
    "phases_within_step": FollowUp(
        "Your phases add up to more than the step. How can that be?",
        "overlapped communication is counted twice; only its exposed part belongs to the step",
        (86,),
        "docs/metrics.md",
    ),
    "phases_attributed": FollowUp(
        "How do you prove that a phase measures what it is named for?",
        "a delay that is put into one phase appears there and nowhere else",
        (86,),
        "docs/metrics.md",
    ),
    "rank_errors": FollowUp(
        "Rank 3 fails. What does the log of rank 0 say?",
        "only that a peer is gone: the first failure must be recorded by the rank that has it",
        (61, 63),
        "docs/recovery.md",
    ),
}
"""check -> the question that its failure raises"""

FOUR_QUESTIONS = (
    FollowUp(
        "Define one training step of your pipeline.",
        "its parts in order, including transfer and accumulation, and the one update that ends it",
        (100, 106),
    ),
    FollowUp(
        "Who reads which sample, and how can you prove it?",
        "a function of seed and global position, of which each rank takes its part; and set algebra over what was read",
        (101, 107),
    ),
    FollowUp(
        "What has to be on disk so that a restart is the same run?",
        "everything that the next step reads, and enough identity to refuse another run",
        (102, 108),
    ),
    FollowUp(
        "If you could watch one number, which one says that the job is broken?",
        "useful progress: unique samples per second; steps per second stays high while data is replayed",
        (103, 109),
    ),
)

PRESSURE_QUESTIONS = (
    FollowUp("At which line do ranks wait for each other?", "the line, the collective and its bytes", (104,)),
    FollowUp(
        "Which mistake would train on without any error, and what would catch it?",
        "replayed data, unsynchronized replicas or a wrong division, each with the comparison that shows it",
        (104,),
    ),
    FollowUp(
        "With ten times the ranks, what fails first?",
        "the batch that no longer divides, or the exposed share of communication, with a number",
        (104,),
    ),
    FollowUp(
        "What did you leave out on purpose, and where would it go?",
        "launcher, storage, metrics or sharding, each behind a boundary that the code already has",
        (79, 104),
    ),
)


def questions_for(failed: Iterable[str]) -> list[tuple[str, FollowUp]]:
    """(check, question) for every check that failed and has one; contract checks ask for code, not for an answer."""
    return [(name, FOLLOW_UPS[name]) for name in failed if name in FOLLOW_UPS]


def cards_about(items: Iterable[int]) -> list[str]:
    """The ids of the cards that make these handbook items real."""
    wanted = set(items)
    return [card.id for card in all_cards().values() if wanted & set(card.items)]


def where_to_learn(question: FollowUp) -> str:
    """The cards and the page about a question, or an empty string."""
    cards = cards_about(question.items)[:3]
    parts = [f"cards {', '.join(cards)}"] if cards else []
    return "; ".join([*parts, *([question.page] if question.page else [])])
