"""Compares recorded states: the first difference in the order of computation, how many tensors differ, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.prover.state.recording import StateRecord

Reference = dict[int, dict[int, StateRecord]]
"""rank -> number of completed steps -> the state of an undisturbed run."""


@dataclass(frozen=True)
class StateDifference:
    """The earliest difference between a state and the state that an undisturbed run has after as many steps."""

    done: int
    rank: int
    where: str
    """the state that differs, such as "the state that attempt 3 restored" """
    first: str
    """the first quantity that differs, in the order in which a step computes them, with both values if it is small"""
    tensors: int
    """the number of tensors that differ"""
    total: int
    meaning: str

    def __str__(self) -> str:
        count = f"; {self.tensors} of {self.total} tensors differ" if self.tensors else ""
        meaning = f": {self.meaning}" if self.meaning else ""
        return f"{self.where} differs first in {self.first} (rank {self.rank}, after {self.done} steps){count}{meaning}"


def make_reference(records: dict[int, list[StateRecord]]) -> Reference:
    return {rank: {record.done: record for record in of_rank} for rank, of_rank in records.items()}


def find_difference(
    reference: Reference, states: Iterable[StateRecord], where: str = "the state of attempt {attempt}"
) -> StateDifference | None:
    """The earliest difference of any of the states, or None. All of them are compared, on all ranks."""
    by_step: dict[tuple[int, int], list[StateRecord]] = {}
    for state in states:
        by_step.setdefault((state.attempt, state.done), []).append(state)
    for _, of_ranks in sorted(by_step.items()):
        differing = [(state, list(compare_states(reference[state.rank].get(state.done), state))) for state in of_ranks]
        differing = [(state, found) for state, found in differing if found]
        if differing:
            state, found = differing[0]
            tensors = {name for _, of_rank in differing for name in differing_tensors(of_rank)}
            total = {name for of_rank in of_ranks for name in of_rank.tensors}
            meaning = explain(reference, differing, tensors, total, len(of_ranks))
            text = where.format(attempt=state.attempt)
            return StateDifference(state.done, state.rank, text, found[0][1], len(tensors), len(total), meaning)
    return None


def compare_states(expected: StateRecord | None, state: StateRecord) -> Iterator[tuple[str, str]]:
    """(name, description) of every difference, in the order in which a step computes the quantities: what it reads,
    then loss, parameters, buffers, moments, and counters.
    """
    if expected is None:
        yield "step", f"its number of steps, {state.done}, which the undisturbed run never had"
        return
    if state.step:
        yield from compare_values(expected.step, state.step)
    for name in expected.tensors | state.tensors:
        before, after = expected.tensors.get(name), state.tensors.get(name)
        if before is None or after is None:
            yield name, f"{name}, which is missing {'in it' if after is None else 'in the undisturbed run'}"
        elif before != after:
            yield name, name
    yield from compare_values(expected.small, state.small)


def compare_values(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in expected | found:
        if expected.get(name) != found.get(name):
            yield name, f"{name} (expected {shorten(expected.get(name))}, found {shorten(found.get(name))})"


def shorten(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + " ..."


def differing_tensors(found: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in found if "/" in name]


def explain(
    reference: Reference,
    differing: list[tuple[StateRecord, list[tuple[str, str]]]],
    tensors: set[str],
    total: set[str],
    ranks: int,
) -> str:
    """What the pattern of differences means; '' if it has no known meaning."""
    parts = []
    if tensors:
        if (other := step_of_tensors(reference, differing)) is not None:
            parts.append(f"the tensors that differ are those after {other} steps")
        parts.append(explain_kinds(tensors, total))
        if len(differing) < ranks:
            parts.append(f"only on rank {', '.join(str(state.rank) for state, _ in differing)}")
    return "; ".join(filter(None, parts))


def step_of_tensors(reference: Reference, differing: list[tuple[StateRecord, list[tuple[str, str]]]]) -> int | None:
    """The number of steps after which the undisturbed run had the tensors that differ, or None if it never had them."""
    candidates: set[int] | None = None
    for state, found in differing:
        names = differing_tensors(found)
        steps = {
            done
            for done, expected in reference[state.rank].items()
            if all(expected.tensors.get(name) == state.tensors.get(name) for name in names)
        }
        candidates = steps if candidates is None else candidates & steps
    return min(candidates) if candidates else None


def explain_kinds(tensors: set[str], total: set[str]) -> str:
    kinds = {name.partition("/")[0] for name in tensors}
    all_kinds = {name.partition("/")[0] for name in total}
    words = {
        "model": "parameters",
        "buffer": "buffers",
        "optimizer": "optimizer moments",
        "offloaded": "offloaded copies",
        "rounded": "rounded weights",
    }
    if tensors == total and len(total) > 1:
        return "every tensor differs"
    if kinds < all_kinds:
        return f"only {' and '.join(words[kind] for kind in words if kind in kinds)} differ"
    return ""
