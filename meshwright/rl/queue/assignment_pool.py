"""Which permitted groups wait for a generator, and which generator has which group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from meshwright.rl.version import PolicyVersion


@dataclass
class AssignmentPool:
    """Assigns the group with the lowest number first; a group that is open is not assigned again until it returns."""

    open: dict[int, tuple[str, PolicyVersion]] = field(default_factory=dict)
    """group -> the generator that has it, and the policy version that it was assigned with"""
    overdue: dict[tuple[str, int], PolicyVersion] = field(default_factory=dict)
    """(generator, group) of assignments of a lost timeline: their late answers are recorded, and not trained"""
    _waiting: list[int] = field(default_factory=list)
    """heap; a group that was answered in the meantime is skipped when it comes up"""

    def refill(self, groups: Iterable[int]) -> None:
        """Replaces the waiting groups."""
        self._waiting = [group for group in groups if group not in self.open]
        heapify(self._waiting)

    def put(self, group: int) -> None:
        heappush(self._waiting, group)

    def take(self, wanted: Callable[[int], bool]) -> int | None:
        """Removes the lowest waiting group that is still wanted."""
        while self._waiting:
            group = heappop(self._waiting)
            if group not in self.open and wanted(group):
                return group
        return None

    def keep_open(self, keeps: Callable[[int, PolicyVersion], bool]) -> None:
        """A new attempt has begun: assignments whose version is lost become overdue."""
        for group, (generator, version) in list(self.open.items()):
            if not keeps(group, version):
                del self.open[group]
                self.overdue[generator, group] = version

    def is_assigned(self, generator: str, group: int, version: PolicyVersion) -> bool:
        return version == self.overdue.get((generator, group)) or self.open.get(group) == (generator, version)

    def answer(self, generator: str, group: int, version: PolicyVersion) -> None:
        """The generator has sent the group; it returns to the pool unless its record is accepted.

        A record of another version is one that the generator sends again: it still generates the group.
        """
        if self.overdue.get((generator, group)) == version:
            del self.overdue[generator, group]
        if self.open.get(group) == (generator, version):
            del self.open[group]
            self.put(group)

    def release(self, generator: str) -> list[int]:
        """Returns the groups of a generator to the pool."""
        groups = sorted(group for group, (holder, _) in self.open.items() if holder == generator)
        for group in groups:
            del self.open[group]
            self.put(group)
        for key in [key for key in self.overdue if key[0] == generator]:
            del self.overdue[key]
        return groups
