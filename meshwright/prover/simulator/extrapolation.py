"""Linear extrapolation of a step's bytes and memory timeline from two small steps to a large one; torch-free.

Transformer blocks are alike, so each additional block adds the same messages, and adds the same number of bytes to the
memory in use at every point of the step. The same holds for micro-steps, and for rounds of micro-batches once a
pipeline is full. Two steps that differ by one stride (one block, one micro-step, one round) therefore determine every
larger step.

The memory timeline of a step lists, phase by phase, the bytes of every memory class after each allocation. The larger
step has more entries, all of them between the first and the last block of a phase. An entry of the smaller step is
matched with the entry of the larger step that has the same distance from the start, or from the end, of the phase, and
is extrapolated along the line through both. The first two blocks are matched from the start, and the last two from the
end. The memory use of the blocks between the second block and the last block but one is between theirs, so the largest
extrapolated entry is the peak. Four blocks are therefore enough, and a fifth gives the slope.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

ClassBytes = tuple[int, ...]
"""Bytes in use by memory class."""
Allocation = tuple[str, int]
"""The class and the size of the tensor that changed the memory in use; equal allocations identify matching entries."""
PhaseTimeline = list[tuple[Allocation, ClassBytes]]
MemoryTimeline = list[tuple[str, PhaseTimeline]]
"""The phases of a step in order, each with its name."""
CollectiveSums = dict[tuple[str, str, int], tuple[int, int]]
"""Calls and message bytes by axis, collective and group size."""


class ExtrapolationError(ValueError):
    """The two small steps do not have the same structure."""


@dataclass(frozen=True)
class SimulatedStep:
    """The collectives and the memory timeline of one step."""

    collectives: CollectiveSums
    timeline: MemoryTimeline


@dataclass(frozen=True)
class Extrapolation:
    """A count (of blocks or micro-steps) that is reached from a smaller one in equal strides."""

    base: int
    stride: int = 0
    strides: int = 0

    @property
    def target(self) -> int:
        return self.base + self.stride * self.strides

    @property
    def simulated_counts(self) -> tuple[int, ...]:
        """The counts to simulate: the target itself if that is no more work than the two small steps."""
        two = (self.base, self.base + self.stride)
        return two if sum(two) < self.target else (self.target,)

    @classmethod
    def plan(cls, target: int, minimum: int, stride: int = 1) -> Extrapolation:
        strides = max(0, target - minimum) // stride
        return cls(target - strides * stride, stride, strides)


def extrapolate(traces: Sequence[SimulatedStep], strides: int) -> SimulatedStep:
    """Returns a single trace as it is, and extends the line through two traces by this many strides."""
    if len(traces) == 1:
        return traces[0]
    small, large = traces
    collectives = {}
    for key, (calls, message_bytes) in large.collectives.items():
        small_calls, small_bytes = small.collectives.get(key, (0, 0))
        collectives[key] = (linear(small_calls, calls, strides), linear(small_bytes, message_bytes, strides))
    timeline: MemoryTimeline = []
    for (phase, before), (_, after) in match_phases(small.timeline, large.timeline):
        matches = match_entries(before, after)
        timeline.append(
            (phase, [(allocation, linear_bytes(a, b, strides)) for (allocation, a), (_, b) in matches])
        )  # fmt: skip
    return SimulatedStep(collectives, timeline)


def match_phases(
    small: MemoryTimeline, large: MemoryTimeline
) -> Iterator[tuple[tuple[str, PhaseTimeline], tuple[str, PhaseTimeline]]]:
    """Pairs the first phases counted from the start, and the others counted from the end. The split between the two is
    where most pairs have the same sequence of allocations, and where the fewest different amounts of memory are added:
    the first micro-steps differ from later ones, for example because the second one is the first to find gradients to
    accumulate into, or because a pipeline fills. Both ends of the longer step have counterparts if the split is not
    within two strides of either.
    """
    extra, middle = len(large) - len(small), len(small) // 2
    if extra < 0:
        raise ExtrapolationError("a larger simulated step has fewer phases than a smaller one")
    from_start = [compare_phases(*pair) for pair in zip(small, large, strict=False)]
    from_end = [compare_phases(*pair) for pair in zip(small, large[extra:], strict=True)]
    inner_splits = range(min(2 * extra, middle), max(len(small) - 2 * extra, middle) + 1)

    def mismatches(split: int) -> tuple[int, int, bool, int, int]:
        pairs = [*from_start[:split], *from_end[split:]]
        names, allocations = sum(pair.names_differ for pair in pairs), sum(pair.allocations_differ for pair in pairs)
        amounts = len(frozenset[ClassBytes]().union(*(pair.added for pair in pairs)))
        outer = split not in inner_splits
        return names, allocations, outer, 0 if outer else amounts, abs(split - middle)

    split = min(range(len(small) + 1), key=mismatches)
    if mismatches(split)[0]:
        raise ExtrapolationError("the phases of two simulated steps do not match")
    for index, item in enumerate(small):
        yield item, large[index if index < split else index + extra]


class PhaseDifference(NamedTuple):
    """How a phase differs from its counterpart in a larger step."""

    names_differ: bool
    allocations_differ: bool
    added: frozenset[ClassBytes]
    """the amounts of memory that the larger step adds to that in use; none if allocations differ"""


def compare_phases(small: tuple[str, PhaseTimeline], large: tuple[str, PhaseTimeline]) -> PhaseDifference:
    (name, entries), (other_name, others) = small, large
    if [key for key, _ in entries] != [key for key, _ in others]:
        return PhaseDifference(name != other_name, True, frozenset())
    added = frozenset(tuple(map(sub, b, a)) for (_, a), (_, b) in zip(entries, others, strict=True))
    return PhaseDifference(name != other_name, False, added)


def match_entries(
    small: PhaseTimeline, large: PhaseTimeline
) -> Iterator[tuple[tuple[Allocation, ClassBytes], tuple[Allocation, ClassBytes]]]:
    """Pairs each entry of a phase with its one or two counterparts in the longer phase. Of the entries that look alike
    from one end, the last `extra` may belong to the block at the other end; they are matched from there.
    """
    extra, middle = len(large) - len(small), len(small) // 2
    if extra < 0:
        raise ExtrapolationError("a phase of a larger simulated step allocates less often than that of a smaller one")
    if extra == 0:
        yield from zip(small, large, strict=True)
        return
    same = [small[index][0] == large[index][0] for index in range(len(small))]
    start = (same.index(False) if False in same else len(small)) - extra
    same = [small[-index][0] == large[-index][0] for index in range(1, len(small) + 1)]
    end = len(small) - ((same.index(False) if False in same else len(small)) - extra)
    for index, entry in enumerate(small):
        from_start, from_end = index < start, index >= end
        if from_start or (not from_end and index < middle):
            yield entry, large[index]
        if from_end or (not from_start and index >= middle):
            yield entry, large[index + extra]


def linear(small: int, large: int, strides: int) -> int:
    return small + strides * (large - small)


def linear_bytes(small: ClassBytes, large: ClassBytes, strides: int) -> ClassBytes:
    return tuple(linear(a, b, strides) for a, b in zip(small, large, strict=True))


def peaks(timeline: MemoryTimeline) -> tuple[ClassBytes, ClassBytes]:
    """The peak of every class on its own, and all classes at the last entry with the largest total."""
    entries = [classes for _, phase in timeline for _, classes in phase]
    by_class = tuple(max(column) for column in zip(*entries, strict=True))
    largest = max(map(sum, entries))
    return by_class, next(classes for classes in reversed(entries) if sum(classes) == largest)
