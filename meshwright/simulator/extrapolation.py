"""How a step on a few blocks and micro-steps stands for one on many: what grows with them grows by as much each time.

Blocks are alike, so that one block more adds the same messages, and to what is held at any moment of the step the same
bytes. The course of a step is what was held after every change, phase by phase. With one block more a phase has more
changes, all of them between its first and its last block. A moment of the small step has its counterpart in the larger
one as far from the beginning, or as far from the end, as it is itself, and is carried on along the line through both;
a moment of a middle block along two lines, as the second block and as the last but one. The peak is the largest of what
is found: what lies between the second block and the last but one is between their bytes. So three blocks are enough,
and a fourth to know by how much. The same holds for micro-steps, and for rounds of a pipeline that is full. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

ClassBytes = tuple[int, ...]
"""Bytes by class."""
Mark = tuple[str, int]
"""The class and the size of what came last: by it counterparts are known."""
Phase = tuple[str, list[tuple[Mark, ClassBytes]]]
MemoryTimeline = list[Phase]
Sums = dict[tuple[str, str, int], tuple[int, int]]
"""By axis, collective and ranks: calls and message bytes."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class StepTrace:
    """A step: what it sent, and the course of what it held."""

    sums: Sums
    course: MemoryTimeline


@dataclass(frozen=True)
class Extrapolation:
    """A number that is reached from a small one by so many equal strides."""

    few: int
    stride: int = 0
    times: int = 0

    @property
    def whole(self) -> int:
        return self.few + self.stride * self.times

    @property
    def points(self) -> tuple[int, ...]:
        """The numbers to go through: the whole, where it takes no more than the two to carry on from."""
        two = (self.few, self.few + self.stride)
        return two if sum(two) < self.whole else (self.whole,)

    @classmethod
    def to(cls, whole: int, least: int, stride: int = 1) -> Extrapolation:
        times = max(0, whole - least) // stride
        return cls(whole - times * stride, stride, times)


def extrapolate(found: Sequence[StepTrace], times: int) -> StepTrace:
    """Carries one step, or the line through two, on by so many strides."""
    if len(found) == 1:
        return found[0]
    few, more = found
    sums = {
        key: (along(few.sums.get(key, (0, 0))[0], more.sums[key][0], times),
              along(few.sums.get(key, (0, 0))[1], more.sums[key][1], times))
        for key in more.sums
    }  # fmt: skip
    course: MemoryTimeline = []
    for (phase, before), (other, after) in halves(few.course, more.course):
        if phase != other:
            raise ValueError(f"a step with more blocks or micro-steps has {other} where one with fewer has {phase}")
        pairs = counterparts(before, after)
        course.append((phase, [(mark, carried(a, b, times)) for (mark, a), (_, b) in pairs]))
    return StepTrace(sums, course)


def halves(few: Sequence[Item], more: Sequence[Item]) -> Iterator[tuple[Item, Item]]:
    """Each item of the shorter with one of the longer: of the first half from the beginning, of the second from the
    end.
    """
    half, further = len(few) // 2, len(more) - len(few)
    for place, item in enumerate(few):
        yield item, more[place if place < half else place + further]


Marked = list[tuple[Mark, ClassBytes]]


def counterparts(few: Marked, more: Marked) -> Iterator[tuple[tuple[Mark, ClassBytes], tuple[Mark, ClassBytes]]]:
    """Moments of a phase, each with those that it has in the longer one. The last block that looks alike from one end
    may be the one at the other end, which is left to be found from there.
    """
    further = len(more) - len(few)
    if further <= 0:
        yield from halves(few, more)
        return
    same = [few[place][0] == more[place][0] for place in range(len(few))]
    beginning = (same.index(False) if False in same else len(few)) - further
    same = [few[-place][0] == more[-place][0] for place in range(1, len(few) + 1)]
    end = len(few) - ((same.index(False) if False in same else len(few)) - further)
    for place, moment in enumerate(few):
        from_beginning, from_end = place < beginning, place >= end
        if from_beginning or (not from_end and place < len(few) // 2):
            yield moment, more[place]
        if from_end or (not from_beginning and place >= len(few) // 2):
            yield moment, more[place + further]


def along(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def carried(few: ClassBytes, more: ClassBytes, times: int) -> ClassBytes:
    return tuple(a + times * (b - a) for a, b in zip(few, more, strict=True))


def peaks(course: MemoryTimeline) -> tuple[ClassBytes, ClassBytes]:
    """The most of every class by itself, and all classes when most is held in all; the last such moment."""
    moments = [moment for _, marked in course for _, moment in marked]
    alone = tuple(max(column) for column in zip(*moments, strict=True))
    largest = max(map(sum, moments))
    return alone, next(moment for moment in reversed(moments) if sum(moment) == largest)
