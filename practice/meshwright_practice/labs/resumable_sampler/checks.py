"""The checks of the lab on the resumable sampler."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright_practice.labs.work import Work

LENGTH, BATCH, RANKS, EPOCHS = 20, 6, 3, 3
STEPS = LENGTH * EPOCHS // BATCH
"""Steps after which whole epochs end together with a batch."""
LONG = 5000
MAX_STATE = 300
"""Bytes of a state as JSON; its numbers may have more digits for a longer dataset."""

State = dict[str, Any]
Batch = list[list[int]]
"""The samples of every rank."""


class GradedSampler:
    """The user's functions, called on all ranks one after the other, with the state passed through JSON."""

    def __init__(self, module: Any, seed: int = 0, length: int = LENGTH) -> None:
        self.module = module
        self.state: State = json.loads(json.dumps(module.start(seed, length)))
        self.states: list[State] = []

    def step(self, ranks: int) -> Batch:
        text = json.dumps(self.state)
        results = [self.module.next_batch(json.loads(text), rank, ranks, BATCH) for rank in range(ranks)]
        self.states = [json.loads(json.dumps(state)) for _, state in results]
        self.state = self.states[0]
        return [list(samples) for samples, _ in results]

    def run(self, ranks: int, steps: int) -> list[Batch]:
        return [self.step(ranks) for _ in range(steps)]


def flat(batches: Sequence[Batch]) -> list[int]:
    return [sample for batch in batches for samples in batch for sample in samples]


def as_sets(batches: Sequence[Batch]) -> list[list[int]]:
    """The samples of every global batch, whoever has them."""
    return [sorted(flat([batch])) for batch in batches]


def check_indices(work: Work, batches: list[Batch]) -> None:
    lengths = {len(samples) for batch in batches for samples in batch}
    valid = all(isinstance(sample, int) and 0 <= sample < LENGTH for sample in flat(batches))
    work.require(
        "indices",
        valid and lengths == {BATCH // RANKS},
        f"{BATCH // RANKS} numbers from 0 to {LENGTH - 1} per rank and batch",
        f"batches of {sorted(lengths)} samples" if valid else "other values",
        "batch_size is that of all ranks together: each rank gets batch_size / ranks samples, as Python integers",
    )
    overlaps = [step for step, batch in enumerate(batches) if len({*flat([batch])}) < BATCH and crosses_no_epoch(step)]
    work.require(
        "ranks do not overlap",
        not overlaps,
        "no sample on two ranks in one step",
        f"step {overlaps[0]}: {batches[overlaps[0]]}" if overlaps else "none",
        "rank r takes every N-th sample of the global batch, starting with r",
    )


def crosses_no_epoch(step: int) -> bool:
    return step * BATCH // LENGTH == (step * BATCH + BATCH - 1) // LENGTH


def check_epochs(work: Work, batches: list[Batch]) -> None:
    whole = LENGTH // BATCH
    first = flat(batches[:whole])
    counts = Counter(flat(batches))
    repeated = [sample for sample, count in Counter(first).items() if count > 1]
    uneven = sorted(sample for sample in range(LENGTH) if counts[sample] != EPOCHS)
    rest = {*range(LENGTH)} - {*first}
    crossing = flat([batches[whole]])
    if repeated:
        message = "a sample comes twice within an epoch: does the position advance by batch_size in every step?"
    elif not rest <= {*crossing}:
        message = f"the last samples of epoch 0 are left out of batch {whole}: an epoch need not end with a batch"
    else:
        message = "samples are repeated to fill the last batch of an epoch: go on with the next epoch instead"
    found = f"{len(uneven)} samples are not, such as {uneven[0]}: {counts[uneven[0]]} times" if uneven else "they are"
    work.check(
        "every sample once per epoch",
        not uneven and not repeated and rest <= {*crossing},
        f"each of {LENGTH} samples {EPOCHS} times in {STEPS} batches of {BATCH}",
        found if rest <= {*crossing} else f"batch {whole} is {sorted(crossing)}",
        message,
    )


def epoch_order(module: Any, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch of a dataset whose length is a multiple of the batch."""
    sampler = GradedSampler(module, seed, 10 * BATCH)
    return [flat([batch]) for batch in sampler.run(1, 10 * (epoch + 1))][-10:]


def check_orders(work: Work) -> None:
    zero, one = epoch_order(work.module, 0, 0), epoch_order(work.module, 0, 1)
    shuffled = [sample for batch in zero for sample in batch] != list(range(10 * BATCH))
    work.check(
        "order changes with the epoch",
        shuffled and zero != one,
        "a shuffled order, another one in every epoch",
        "epoch 1 has the order of epoch 0" if shuffled else "the order is not shuffled",
        "the epoch is part of the seed of the generator",
    )
    other = epoch_order(work.module, 1, 0)
    again = epoch_order(work.module, 0, 0)
    if zero != again:
        found, message = "two orders for one seed", "the order is a function of seed and epoch, and of nothing else"
    elif zero == other:
        found, message = "seeds 0 and 1 have the same order", "the seed is part of the seed of the generator"
    else:
        found = "epoch 1 of seed 0 is epoch 0 of seed 1" if one == other else "another order per seed"
        message = "seed + epoch is the same number for (0, 1) and (1, 0): seed the generator with both, not their sum"
    work.check(
        "order depends on the seed",
        zero == again and zero != other and one != other,
        "one order per seed and epoch",
        found,
        message,
    )


def check_resume(work: Work, batches: list[Batch]) -> None:
    """Stops after every step, and goes on from the state, as JSON, with the same and with other numbers of ranks."""
    others = {ranks: GradedSampler(work.module).run(ranks, STEPS) for ranks in (1, 2, 6)}
    wrong = [ranks for ranks, found in others.items() if as_sets(found) != as_sets(batches)]
    work.check(
        "any number of ranks",
        not wrong,
        f"the same global batches on 1, 2, {RANKS} and 6 ranks",
        f"other batches on {wrong[0]} ranks" if wrong else "the same",
        "first the global batch, then the part of a rank: the order must not depend on the number of ranks",
    )
    for name, ranks, message in (
        ("resume", RANKS, "everything that the next batch depends on is in the state, and nothing is kept elsewhere"),
        ("resume on other ranks", 2, "the position counts samples of all ranks, not steps and not samples of one rank"),
    ):
        if name != "resume" and not work.passed("resume"):
            continue
        stop = first_difference(work, batches, ranks)
        found = "the same batches" if stop < 0 else f"after a stop at step {stop}, the next batches are others"
        work.check(
            name, stop < 0, f"after a stop at any step, {ranks} ranks go on with the same batches", found, message
        )


def first_difference(work: Work, batches: list[Batch], ranks: int) -> int:
    """The first step after which a resumed sampler has other global batches; -1 if there is none."""
    for stop in range(1, STEPS):
        sampler = GradedSampler(work.module)
        sampler.run(RANKS, stop)
        resumed = GradedSampler(work.module)  # as in a new process: the functions start again
        resumed.state = sampler.state
        if as_sets(resumed.run(ranks, STEPS - stop)) != as_sets(batches[stop:]):
            return stop
    return -1


def check_state(work: Work) -> None:
    sampler = GradedSampler(work.module, 0, LONG)
    sampler.run(1, 3)
    size = len(json.dumps(sampler.state))
    work.check(
        "size of the state",
        size <= MAX_STATE,
        f"at most {MAX_STATE} bytes of JSON, for {LONG:,} samples as for {LENGTH}",
        f"{size:,} bytes",
        "the order follows from the seed: it is not part of the state",
    )
    changed = [name for name, state in GLOBAL_STATES.items() if moves(work, state)]
    random.seed(1)
    first = as_sets(GradedSampler(work.module).run(1, STEPS))
    random.seed(2)
    torch.manual_seed(2)
    depends = as_sets(GradedSampler(work.module).run(1, STEPS)) != first
    work.check(
        "random state",
        not changed and not depends,
        "the random numbers of the rest of the program neither change nor matter",
        "the order depends on them"
        if depends
        else f"the state of {' and '.join(changed)} changes"
        if changed
        else "so it is",
        "use a generator of your own: random.Random(...), or torch.Generator().manual_seed(...)",
    )


GLOBAL_STATES: dict[str, Callable[[], object]] = {
    "random": random.getstate,
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
}


def moves(work: Work, state: Callable[[], object]) -> bool:
    before = state()
    GradedSampler(work.module).run(1, STEPS)
    return state() != before


def grade(work: Work) -> None:
    with work.attempt("functions return"):
        sampler = GradedSampler(work.module)
        batches = sampler.run(RANKS, STEPS)
    with work.user_code("resume"):
        check_indices(work, batches)
        check_epochs(work, batches)
        check_orders(work)
        work.check(
            "same state on all ranks",
            all(state == sampler.state for state in sampler.states),
            "the state after a batch is the same on all ranks",
            "the same" if all(state == sampler.state for state in sampler.states) else f"{sampler.states}",
            "the state describes the job, not the rank: any rank may write it, and any rank may read it",
        )
        check_resume(work, batches)
        check_state(work)
