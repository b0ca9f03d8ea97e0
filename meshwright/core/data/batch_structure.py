"""The structure of a sample or batch: its entries, which of them are targets, and how it becomes a flat tuple and back.

A micro-batch travels as a flat tuple of tensors. Entries of a dict or dataclass are found by name and never by
position: a dict with the same keys in another order is the same sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import DataError

TARGET_NAMES = ("labels", "label", "targets", "target")
"""Names of entries that are targets, the preferred one first."""


@dataclass(frozen=True)
class CountRule:
    """How the number of valid targets of a batch follows from its entries; the summed loss is divided by it."""

    kind: Literal["valid", "shifted", "nonzero", "samples"] = "valid"
    """`valid`: integer targets that are not `ignored`, or samples where targets are not integers; `shifted`: the same
    without the first position of each sequence, which a model that shifts its labels never predicts; `nonzero`: entries
    of a mask; `samples`: samples of the batch"""
    entry: int = -1
    """position of the entry in the flat tuple"""
    ignored: int = -100
    """the value of integer targets that are not valid"""


@dataclass(frozen=True)
class Node:
    """A tuple, dict or dataclass inside a structure; its leaves are positions in the flat tuple."""

    kind: type
    """tuple, dict, or the dataclass"""
    children: tuple[tuple[str, Node | int], ...]


@dataclass(frozen=True)
class BatchStructure:
    """The entries of every sample of a dataset, or of every batch that a collate function returns."""

    root: Node
    names: tuple[str, ...]
    """the name of each entry of the flat tuple; nested names are joined by dots, positions of a tuple are numbers"""
    targets: tuple[int, ...]
    """positions of the targets in the flat tuple"""
    count: CountRule | None = CountRule()
    """None: no entry is known to be the target, so the loss must return its count"""

    @classmethod
    def of(cls, sample: Any) -> BatchStructure:
        """Returns the structure of a sample or batch. Targets are the last entry of a tuple, or the entries of a dict
        or dataclass that are named `labels`, `label`, `targets` or `target`. They come last in the flat tuple.
        """
        paths = sorted(leaf_paths(sample), key=lambda path: path_order(sample, path))
        names = tuple(".".join(path) for path in paths)
        if isinstance(sample, tuple):
            targets = tuple(i for i, path in enumerate(paths) if path[0] == str(len(sample) - 1))
        else:
            targets = tuple(i for i, path in enumerate(paths) if path[-1] in TARGET_NAMES)
        preferred = sorted(targets, key=lambda i: (target_rank(paths[i][-1]), i))
        root = build_node(sample, (), {path: i for i, path in enumerate(paths)})
        if isinstance(root, int):
            raise DataError(
                f"a sample is a {type(sample).__name__}", "expected a tuple, a dict or a dataclass of arrays"
            )
        return cls(root, names, targets, CountRule("valid", preferred[0]) if preferred else None)

    @classmethod
    def of_tuple(cls, entries: int) -> BatchStructure:
        """Returns the structure of a tuple whose last entry is the target."""
        return cls.of((0,) * entries)

    @property
    def is_tuple(self) -> bool:
        return self.root.kind is tuple

    def flatten(self, sample: Any) -> tuple[Any, ...]:
        """Returns the entries of a sample in the order of `names`. Raises ValueError where its entries differ."""
        flat: list[Any] = [None] * len(self.names)
        collect_leaves(self.root, sample, "", flat)
        return tuple(flat)

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """Returns a flat tuple as the tuple, dict or dataclass that it was."""
        return rebuild(self.root, flat)

    def entries(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Returns the top-level entries of a dict or dataclass by name."""
        return {name: child_value(child, flat) for name, child in self.root.children}

    def target_names(self) -> set[str]:
        """Returns the top-level names of entries that contain nothing but targets."""
        return {name for name, child in self.root.children if set(leaves(child)) <= set(self.targets)}

    def with_count(self, rule: CountRule) -> BatchStructure:
        return dataclasses.replace(self, count=rule)


def is_dataclass_value(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the named children of a container, or None for a leaf. A list of numbers is a leaf: an array."""
    if is_dataclass_value(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(str(key), value[key]) for key in value]
    if isinstance(value, tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    return None


def leaf_paths(sample: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    children = children_of(sample)
    if children is None:
        yield path
        return
    for name, child in children:
        yield from leaf_paths(child, (*path, name))


def path_order(sample: Any, path: tuple[str, ...]) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """Sorts entries by name, targets last, so that the order of keys has no effect; a tuple keeps its order."""
    is_target = not isinstance(sample, tuple) and path[-1] in TARGET_NAMES
    return is_target, tuple((int(name), "") if name.isdecimal() else (0, name) for name in path)


def target_rank(name: str) -> int:
    return TARGET_NAMES.index(name) if name in TARGET_NAMES else len(TARGET_NAMES)


def build_node(value: Any, path: tuple[str, ...], positions: dict[tuple[str, ...], int]) -> Node | int:
    children = children_of(value)
    if children is None:
        return positions[path]
    kind = type(value) if is_dataclass_value(value) else tuple if isinstance(value, tuple) else dict
    return Node(kind, tuple((name, build_node(child, (*path, name), positions)) for name, child in children))


def collect_leaves(node: Node | int, value: Any, where: str, flat: list[Any]) -> None:
    if isinstance(node, int):
        flat[node] = value
        return
    children = children_of(value)
    if children is None or (node.kind is tuple) != isinstance(value, tuple):
        raise ValueError(f"{where or 'the sample'} is a {type(value).__name__}, expected a {node.kind.__name__}")
    found, expected = dict(children), dict(node.children)
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"entry {quoted(where, missing)} is missing")
    if extra := sorted(found.keys() - expected.keys()):
        raise ValueError(f"entry {quoted(where, extra)} is not in the first sample")
    for name, child in node.children:
        collect_leaves(child, found[name], f"{where}.{name}" if where else name, flat)


def quoted(where: str, names: list[str]) -> str:
    return ", ".join(repr(f"{where}.{name}" if where else name) for name in names)


def rebuild(node: Node, flat: Sequence[Any]) -> Any:
    values = {name: child_value(child, flat) for name, child in node.children}
    if node.kind is tuple:
        return tuple(values.values())
    if node.kind is dict:
        return values
    batch: Any = object.__new__(node.kind)  # not __init__: a dataclass may validate one sample, and this is a batch
    for name, value in values.items():
        object.__setattr__(batch, name, value)
    return batch


def child_value(child: Node | int, flat: Sequence[Any]) -> Any:
    return flat[child] if isinstance(child, int) else rebuild(child, flat)


def leaves(node: Node | int) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    else:
        for _, child in node.children:
            yield from leaves(child)
