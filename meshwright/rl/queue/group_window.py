"""Which groups may be generated, and by which policy version. Both depend on contents only, not on arrival."""

from __future__ import annotations

from bisect import bisect_right

from meshwright.rl.version import PolicyVersion


class GroupWindow:
    """The permitted groups: those from `first`, the frontier after the last completed step, to before `end`.

    A window ends where that of the step before did, or later, so that every group has one version that first permitted
    it.
    """

    def __init__(self, first: int, end: int, versions: tuple[tuple[int, PolicyVersion], ...]) -> None:
        self.first = first
        self.end = end
        self.versions = versions
        """(first group, version that permitted it and those that follow)"""

    def version(self, group: int) -> PolicyVersion | None:
        """The version whose step first permitted a group; None if it is consumed or not permitted."""
        return self.versions[self._range(group)][1] if self.first <= group < self.end else None

    def extend(self, end: int, version: PolicyVersion) -> None:
        """Permits the groups up to `end`, by the version of the last completed step."""
        if end > self.end:
            if self.versions[-1][1] != version:
                self.versions += ((self.end, version),)
            self.end = end

    def after(self, frontier: int, size: int, version: PolicyVersion) -> GroupWindow:
        """The window after the next step, which moves the frontier and computes `version`."""
        window = GroupWindow(self.first, self.end, self.versions)
        window.extend(frontier + size, version)
        window.first = frontier
        window.versions = window.versions[window._range(frontier) :]
        return window

    def _range(self, group: int) -> int:
        return max(0, bisect_right(self.versions, group, key=lambda entry: entry[0]) - 1)
