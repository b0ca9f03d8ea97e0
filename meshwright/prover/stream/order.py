"""Checks which sample is at which position: the order, the shares of a mixture, the slices of ranks and lookups."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwright.core.data.permutation import MAX_LENGTH
from meshwright.core.data.sample_lookup import SampleLookup
from meshwright.core.data.stream import Stream
from meshwright.prover.oracle.sampler import CYCLE, Sampler
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream, first_difference, shown

MAX_WHOLE_BATCH = 1 << 9
"""Of a larger global batch, only the slices of some ranks are read."""
MAX_LOCAL_BATCH = 1 << 16
"""Slices of more samples, times the number of sources, are not read."""
MAX_COUNTED = 1000
"""Cycles, times the number of sources, whose positions are counted."""
MAX_DEGREE = 16
"""Up to this data-parallel degree every rank is checked; of larger degrees, at most this many ranks."""
LOOKUPS = 200
"""Positions at which `data find` is compared with `data show`."""


def check_order(checked: CheckedStream) -> str:
    positions = checked.positions()
    compare_order(checked, checked.stream, checked.sampler, positions)
    # Streams with another seed and other weights, in turns: a value that was cached for one must not serve another.
    sampler, last = checked.sampler, positions[-1]
    few = [position for position in positions if position // CYCLE in (0, last // CYCLE)]
    few = checked.random.sample(few, min(len(few), 12))
    for seed, weights in ((sampler.seed ^ 1, sampler.weights), (sampler.seed, sampler.weights[::-1])):
        variant = Sampler(seed, sampler.global_batch, sampler.lengths, weights, sampler.holdout)
        stream = Stream.from_lengths(seed, sampler.global_batch, sampler.lengths, weights, sampler.holdout)
        for position in sorted(few):
            compare_order(checked, stream, variant, [position])
            compare_order(checked, checked.stream, sampler, [position])
    return f"{len(positions):,} positions up to {last:,} equal the reference; the run reads {checked.own_positions:,}"


def compare_order(checked: CheckedStream, stream: Stream, sampler: Sampler, positions: list[int]) -> None:
    found = stream.sample_ids(np.array(positions, dtype=np.uint64)).tolist()
    expected = [sampler.sample(position) for position in positions]
    if (index := first_difference(expected, found)) is not None:
        where = checked.describe(positions[index])
        raise WrongStream(f"{where}: expected sample {shown(expected, index)}, found {shown(found, index)}")


def check_mixture(checked: CheckedStream) -> str:
    """Counts the positions of every source in whole cycles, with the weights of the config."""
    data, number = checked.config.data, len(checked.sources)
    if number == 1:
        return "the config has one source"
    weights = [source.weight for source in data.mixture]
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    cycles = checked.cycles[: max(2, MAX_COUNTED // number)]
    for cycle in cycles:
        positions = np.arange(cycle * CYCLE, (cycle + 1) * CYCLE, dtype=np.uint64)
        sources = np.searchsorted(checked.starts[1:], checked.stream.sample_ids(positions).astype(np.int64), "right")
        counts = np.bincount(sources, minlength=number).tolist()
        for source, (expected, count) in enumerate(zip(exact, counts, strict=True)):
            if not abs(count - expected) < 1 or count != checked.sampler.shares[source]:
                raise WrongStream(
                    f"source {checked.sources[source].name} has {count:,} of positions {cycle * CYCLE:,} to "
                    f"{(cycle + 1) * CYCLE - 1:,}, expected {checked.sampler.shares[source]:,} "
                    f"(weight {weights[source]:g} of {sum(weights):g})"
                )
    shares = ", ".join(f"{share / CYCLE:.2%}" for share in checked.sampler.shares[:8])
    return f"{shares}{' ...' if number > 8 else ''} in each of {len(cycles)} cycles of {CYCLE:,} positions"


def degrees(global_batch: int) -> list[int]:
    """The data-parallel degrees that divide the global batch."""
    small = [r for r in range(1, int(global_batch**0.5) + 1) if global_batch % r == 0]
    return sorted({*small, *(global_batch // r for r in small)})


def check_rank_slices(checked: CheckedStream) -> str:
    size, compared = checked.sampler.global_batch, 0
    steps = [0, min(checked.config.steps, MAX_LENGTH // size - 1), *checked.far_steps(size, 3)]
    for step in dict.fromkeys(steps):
        middle = checked.random.randrange(size)
        near = {i + offset for i in (0, middle, size - 1) for offset in range(-8, 9)}
        expected = {i: checked.sampler.sample(step * size + i) for i in sorted(near) if 0 <= i < size}
        for degree in degrees(size):
            local = size // degree
            ranks: Iterable[int] = range(degree)
            if degree > MAX_DEGREE or size > MAX_WHOLE_BATCH:
                ranks = sorted({index // local for index in expected})[:MAX_DEGREE]
            if local * len(checked.sources) <= MAX_LOCAL_BATCH:
                for rank in ranks:
                    compare_slice(checked, step, rank, degree, expected)
                    compared += 1
            if size <= MAX_WHOLE_BATCH and degree <= MAX_DEGREE:
                slices = [checked.stream.local_samples(step, rank, degree) for rank in range(degree)]
                if not np.array_equal(np.concatenate(slices), checked.stream.step(step)):
                    expected_batch = checked.stream.step(step)
                    raise WrongStream(f"step {step:,} on {degree} ranks: expected {expected_batch}, found {slices}")
    return f"{compared:,} slices of {list_numbers(degrees(size))} data-parallel ranks, up to step {max(steps):,}"


def compare_slice(checked: CheckedStream, step: int, rank: int, degree: int, expected: dict[int, int]) -> None:
    """Compares the slice of a rank with the reference, which knows some samples of the batch by their index."""
    size = checked.sampler.global_batch
    local, found = size // degree, checked.stream.local_samples(step, rank, degree).tolist()
    first = rank * local
    if len(found) != local:
        raise WrongStream(f"step {step:,}, rank {rank} of {degree}: expected {local:,} samples, found {len(found):,}")
    for index, sample in expected.items():
        if first <= index < first + local and found[index - first] != sample:
            raise WrongStream(
                f"rank {rank} of {degree}, {checked.describe(step * size + index)}: expected sample {sample}, "
                f"found {found[index - first]}"
            )


def list_numbers(numbers: list[int]) -> str:
    """A list for a message, shortened in its middle."""
    shown = [*numbers[:5], "...", numbers[-1]] if len(numbers) > 7 else numbers
    return ", ".join(map(str, shown))


def check_find_inverts_show(checked: CheckedStream) -> str:
    """`Stream.occurrence` over the whole stream; both commands, with ranks, over the first epochs of the run."""
    stream, sampler = checked.stream, checked.sampler
    single = len(checked.sources) == 1
    cycles = [] if single else checked.cycles
    far = [checked.far_position() for _ in range(LOOKUPS // 2)]
    far += [checked.random.choice(cycles or [0]) * CYCLE + checked.random.randrange(CYCLE) for _ in range(LOOKUPS // 2)]
    positions = [p for p in far if single or p // CYCLE in cycles]
    for position, sample in zip(positions, stream.sample_ids(np.array(positions, np.uint64)).tolist(), strict=True):
        source, ordinal = sampler.place(position)
        epoch = ordinal // checked.trained(source)
        found = stream.occurrence(sample, epoch)
        step_index = divmod(position, sampler.global_batch)
        if found is None or (found.epoch, found.position, found.step, found.index) != (epoch, position, *step_index):
            raise WrongStream(f"{checked.describe(position)}: `show` gives sample {sample}, but `find` gives {found}")
        if stream.epoch_at(position) != epoch:
            raise WrongStream(f"{checked.describe(position)}: `epoch_at` gives epoch {stream.epoch_at(position)}")
    return f"`find` returned the right step for {len(positions) + find_in_run(checked):,} samples"


def find_in_run(checked: CheckedStream) -> int:
    """Compares `data show --rank` and `data find` in the steps of the run; returns the number of samples."""
    layout, batch, compared = checked.layout, checked.batch, 0
    lookup = SampleLookup(checked.stream, batch, layout, [source.name for source in checked.sources])
    for _ in range(8):
        position = checked.random.randrange(min(checked.own_positions, CYCLE))
        step, index = divmod(position, batch.global_)
        data_rank, local = divmod(index, batch.local)
        rank, sample = layout.reader_rank(data_rank), checked.sampler.sample(position)
        if batch.local * len(checked.sources) <= MAX_LOCAL_BATCH:
            shown = lookup.show(step, rank)
            if shown["micro_steps"][local // batch.micro][local % batch.micro] != sample:
                raise WrongStream(f"`data show --step {step} --rank {rank}` lacks sample {sample} at index {local}")
        source, ordinal = checked.sampler.place(position)
        epoch = ordinal // checked.trained(source)
        if epoch >= 10:
            continue
        found = lookup.find(sample, epoch + 1)
        expected = {"epoch": epoch, "position": position, "step": step, "index": index}
        expected |= {"rank": rank, "micro_step": local // batch.micro}
        if found["occurrences"][-1:] != [expected] or found["source"] != checked.sources[source].name:
            raise WrongStream(f"`data find --sample {sample}` gives {found}, expected {expected}")
        compared += 1
    return compared
