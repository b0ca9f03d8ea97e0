"""Reads the lines of a user's file out of what faulthandler writes about a process that hangs. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')


def user_line(stack: str, path: str) -> int:
    """The innermost line of the user's file; 0 if there is none. faulthandler writes the innermost line first."""
    for filename, line, _ in FRAME.findall(stack):
        if filename == path or os.path.basename(filename) == os.path.basename(path):
            return int(line)
    return 0


def user_lines(stacks: Mapping[int, str], path: str, source: str) -> str:
    """Says in which line each rank is: "ranks 0, 1 in line 20: dist.recv(...)". Ranks that have returned are absent."""
    ranks_at: dict[int, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_at.setdefault(user_line(stack, path), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {describe_line(line, source)}" for line, ranks in sorted(ranks_at.items()))


def name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_line(line: int, source: str) -> str:
    lines = source.splitlines()
    if not 0 < line <= len(lines):
        return "outside of your file"
    return f"in line {line}: {lines[line - 1].strip()}"
