"""Sample order: what torch's DistributedSampler and the stream give to every rank, also after a restart."""

from __future__ import annotations

from collections import Counter

import numpy as np
from torch.utils.data import DistributedSampler

from meshwright.core.data.sample_lookup import open_sample_lookup
from meshwright.core.data.stream import Stream
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.small_runs import scratch_folder, train_small
from meshwright_practice.pictures import Bars, HeatMap


def sampler_epoch(samples: int, ranks: int, drop_last: bool) -> list[list[int]]:
    """The samples that every rank reads in one epoch of DistributedSampler."""
    data = range(samples)
    return [list(DistributedSampler(data, ranks, rank, drop_last=drop_last)) for rank in range(ranks)]  # type: ignore[arg-type]


def padding(knobs: Knobs) -> Observation:
    """Reads one epoch by DistributedSampler, with and without drop_last, and by the stream."""
    samples, ranks = int(knobs["samples"]), int(knobs["ranks"])
    padded, dropped = (sampler_epoch(samples, ranks, drop_last) for drop_last in (False, True))
    stream = Stream.from_lengths(0, ranks, [samples], [1.0], 0.0)
    positions = np.arange(samples, dtype=np.uint64)
    epoch = Counter(stream.sample_ids(positions).tolist())
    second = stream.sample_ids(positions + np.uint64(samples)).tolist()
    reads = Counter(one for rank in padded for one in rank)
    by_rank = [{one for step in range(samples // ranks) for one in stream.local_samples(step, rank, ranks).tolist()}
               for rank in range(ranks)]  # fmt: skip
    values = {
        "samples": float(samples),
        "reads_padded": float(sum(reads.values())),
        "repeated_padded": float(sum(reads.values()) - len(reads)),
        "missing_padded": float(samples - len(reads)),
        "missing_dropped": float(samples - len({one for rank in dropped for one in rank})),
        "repeated_stream": float(sum(epoch.values()) - len(epoch)),
        "missing_stream": float(samples - len(epoch)),
        "overlap_of_ranks": float(sum(map(len, by_rank)) - len(set().union(*by_rank))),
        "same_order_in_second_epoch": float(list(stream.sample_ids(positions).tolist()) == second),
        "same_samples_in_second_epoch": float(set(epoch) == set(second)),
    }
    labels = ("DistributedSampler", "with drop_last", "stream")
    parts: dict[str, tuple[float, ...]] = {
        "repeated": (values["repeated_padded"], 0.0, values["repeated_stream"]),
        "missing": (values["missing_padded"], values["missing_dropped"], values["missing_stream"]),
    }
    return Observation(values, Bars(f"one epoch of {samples} samples on {ranks} ranks", "samples", labels, parts))


def resume(knobs: Knobs) -> Observation:
    """Kills a run, resumes it on another number of ranks, and compares its samples and losses with an undisturbed run;
    DistributedSampler restarts its epoch in the same situation.
    """
    before, after, stop, steps = (int(knobs[key]) for key in ("ranks_before", "ranks_after", "stop", "steps"))
    settings = ("model.layers=1", "batch.global=8")
    saves = ("checkpoint.mode=sync", f"checkpoint.every={stop}", "checkpoint.seconds=0")
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *settings, f"layout.replicate={before}", steps=steps)
        train_small(
            folder / "killed",
            *settings,
            *saves,
            f"layout.replicate={before}",
            steps=steps,
            faults=f"step.fetch:rank{before - 1}:kill@step{stop}",
            may_fail=True,
        )
        first = {one for step in range(stop) for one in open_sample_lookup(folder / "killed").show(step)["samples"]}
        resumed = train_small(folder / "killed", *settings, *saves, f"layout.replicate={after}", steps=steps)
        lookup = open_sample_lookup(folder / "killed")
        read = [
            {one for rank in range(after) for one in lookup.show(step, rank)["samples"]} for step in range(stop, steps)
        ]
        order = [open_sample_lookup(folder / "whole").show(step)["samples"] for step in range(steps)]
        difference = max(abs(a - b) for a, b in zip(resumed.losses(), whole.losses(), strict=True))
        restored = float(resumed.events("restored")[-1]["step"])
    later, expected = set().union(*read), {one for step in order for one in step}
    samples, batch = 512, 8
    old = sampler_epoch(samples, before, False)
    new = sampler_epoch(samples, after, False)
    consumed = [one for rank in old for one in rank[: stop * batch // before]]
    again = [one for rank in new for one in rank[: (steps - stop) * batch // after]]
    values = {
        "restored_step": restored,
        "stop": float(stop),
        "loss_difference": difference,
        "union": float(len(first | later)),
        "expected_union": float(len(expected)),
        "replayed_stream": float(len(first & later)),
        "missing_stream": float(len(expected - first - later)),
        "replayed_sampler": float(len(set(consumed) & set(again))),
        "missing_sampler": float(steps * batch - len(set(consumed) | set(again))),
        "batch": float(batch),
    }
    rows = tuple(f"step {step}" for step in range(steps))
    table = tuple(tuple(float(one) for one in step) for step in order)
    picture = HeatMap("sample ids of every step", "id", rows, tuple(map(str, range(batch))), table)
    notes = (f"The run was killed before step {stop} on {before} ranks, and resumed on {after}.",)
    return Observation(values, picture, notes)
