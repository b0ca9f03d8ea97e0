"""Random damage to documents: bytes, text, JSON and TOML trees."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import tomli_w

HOSTILE_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 1 << 16, 1 << 31, 1 << 48, 1 << 62, -(1 << 63), 10**30),
    *(0.0, -0.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "none", "nan", "true", "-1", "é\u202e", "\x00", "../../../canary", "/dev/zero", "a" * 5000, "%s%n{0}"),
    *(True, False, None, [], {}, [[]], {"a": {}}, [0] * 3, ["x"] * 50),
)
"""Values that a reader of an untrusted file must expect in any place."""
GARBAGE = (
    b"",
    b"\0" * 64,
    b"\xff\xfe\xfa garbage",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 10_000,
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b'{"kind": "step", "step": 1e400}\n',
    b"\xef\xbb\xbf{}",
)


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """A few bytes changed, removed, repeated or replaced."""
    data = bytearray(content or b"\0")
    match rng.randrange(6):
        case 0:
            for _ in range(rng.choice([1, 1, 8, 64])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data += rng.randbytes(rng.choice([1, 100, 10_000]))
        case 3:
            start = rng.randrange(len(data))
            data[start : start + rng.randrange(1, 200)] = b""
        case 4:
            start = rng.randrange(len(data))
            part = data[start : start + 500]
            data[start:start] = part * rng.choice([1, 2, 50])
        case _:
            return rng.choice(GARBAGE)
    return bytes(data)


def mutate_tree(rng: random.Random, tree: Any, mild: bool = False) -> Any:
    """One place of a nested document replaced, removed, renamed, nested or copied from another. A mild mutation makes
    no size large that stays valid, because training would merely be slow.
    """
    tree = copy.deepcopy(tree)
    places = list(walk(tree))
    if not places:
        return draw_value(rng, tree, mild)
    parent, key = rng.choice(places)
    match rng.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice([f"{key}_", "unknown", "", "a.b", "é"])] = parent.pop(key)
        case 2:
            parent[key] = nest(parent[key], rng.choice([1, 3, 50]))
        case 3:
            other_parent, other_key = rng.choice(places)
            parent[key] = copy.deepcopy(other_parent[other_key])
        case _:
            parent[key] = draw_value(rng, parent[key], mild)
    return tree


def draw_value(rng: random.Random, value: Any, mild: bool = False) -> Any:
    """Another value in the place of `value`: a number near it or a multiple of it, or one of HOSTILE_VALUES."""
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.6:
        factors = (0.5, 2, 3, 4) if mild else (0.5, 2, 3, 4, 16, 1000, 1e6)
        return rng.choice([value + 1, value - 1, -value, type(value)(value * rng.choice(factors))])
    values = [each for each in HOSTILE_VALUES if not (mild and is_large_size(each))]
    return copy.deepcopy(rng.choice(values))


def is_large_size(value: Any) -> bool:
    return isinstance(value, int | float) and 100 < value < 1 << 40


def walk(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every place in a nested document."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *walk(tree[key]))]


def nest(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def mutate_json(rng: random.Random, text: str) -> bytes:
    """A JSON document with a mutated tree, or with mutated bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, text.encode())
    tree = json.loads(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        tree = mutate_tree(rng, tree)
    return json.dumps(tree).encode(errors="replace")


def mutate_toml(rng: random.Random, tree: dict[str, Any], mild: bool = False) -> bytes:
    """A TOML document with a mutated tree, or with mutated bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, tomli_w.dumps(tree).encode())
    mutated: Any = tree
    for _ in range(rng.choice([1, 1, 2, 3])):
        mutated = mutate_tree(rng, mutated, mild)
    mutated = without_null(mutated)
    try:
        return tomli_w.dumps(mutated).encode(errors="replace")
    except (TypeError, ValueError, AttributeError, RecursionError):  # no table, or nested too deeply for the writer
        return json.dumps(mutated).encode()


def without_null(tree: Any) -> Any:
    """TOML has no null: keys without a value are left out."""
    if isinstance(tree, dict):
        return {str(key): without_null(value) for key, value in tree.items() if value is not None}
    return [without_null(item) for item in tree if item is not None] if isinstance(tree, list) else tree
