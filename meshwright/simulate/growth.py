"""How a step on a few blocks and micro-steps stands for one on many: what grows with them grows by as much each time.

Blocks are alike, so that one block more adds the same messages, and to what is held at any moment of the step the same
bytes. The course of a step is what was held after every change. With one block more there are more changes, all of
them between the first and the last block; what comes before and after has its counterpart there. So each moment of the
small step is carried on along its own line, those of the first half counted from the beginning and those of the second
half from the end, and the peak is the largest of what is found. Moments of blocks in the middle lie between those of
the first and the last. The same holds for micro-steps, and for the steady part of a pipeline's schedule. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Moment = tuple[int, ...]
"""Bytes by class."""
Phase = tuple[str, list[Moment]]
Course = list[Phase]
Sums = dict[tuple[str, str, int], tuple[int, int]]
"""By axis, collective and ranks: calls and message bytes."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Seen:
    """A step: what it sent, and the course of what it held."""

    sums: Sums
    course: Course


@dataclass(frozen=True)
class Line:
    """A number that is reached from a small one by so many equal strides."""

    few: int
    stride: int = 0
    times: int = 0

    @property
    def whole(self) -> int:
        return self.few + self.stride * self.times

    @property
    def points(self) -> tuple[int, ...]:
        """The numbers to look at: the whole where it is near, else two to carry on from."""
        return (self.whole,) if self.times < 2 else (self.few, self.few + self.stride)

    @classmethod
    def to(cls, whole: int, least: int, stride: int = 1) -> Line:
        times = max(0, whole - least) // stride
        return cls(whole - times * stride, stride, times)


def grown(found: Sequence[Seen], times: int) -> Seen:
    """Carries one step, or the line through two, on by so many strides."""
    if len(found) == 1:
        return found[0]
    few, more = found
    sums = {
        key: (along(few.sums.get(key, (0, 0))[0], more.sums[key][0], times),
              along(few.sums.get(key, (0, 0))[1], more.sums[key][1], times))
        for key in more.sums
    }  # fmt: skip
    course = []
    for (phase, before), (other, after) in aligned(few.course, more.course):
        if phase != other:
            raise ValueError(f"a step with more blocks or micro-steps has {other} where one with fewer has {phase}")
        course.append((phase, [carried(a, b, times) for a, b in aligned(before, after)]))
    return Seen(sums, course)


def aligned(few: Sequence[Item], more: Sequence[Item]) -> Iterator[tuple[Item, Item]]:
    """Each item of the shorter with its counterpart: of the first half from the beginning, of the second from the
    end.
    """
    half, further = len(few) // 2, len(more) - len(few)
    for place, item in enumerate(few):
        yield item, more[place if place < half else place + further]


def along(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def carried(few: Moment, more: Moment, times: int) -> Moment:
    return tuple(a + times * (b - a) for a, b in zip(few, more, strict=True))


def peaks(course: Course) -> tuple[Moment, Moment]:
    """The most of every class by itself, and all classes when most is held in all; the last such moment."""
    moments = [moment for _, moments in course for moment in moments]
    alone = tuple(max(column) for column in zip(*moments, strict=True))
    largest = max(map(sum, moments))
    return alone, next(moment for moment in reversed(moments) if sum(moment) == largest)
