"""What follows from a config: the batch algebra, and the two fingerprints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshwright.config.constraints import Placement, nearest
from meshwright.config.run_config import BatchConfig, RunConfig
from meshwright.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Batch:
    """global_ = micro x replicas x accumulation."""

    global_: int
    micro: int
    replicas: int
    accumulation: int

    @property
    def local(self) -> int:
        """Samples of one rank in one step."""
        return self.micro * self.accumulation

    def __str__(self) -> str:
        factors = f"micro {self.micro} x data-parallel {self.replicas} x accumulation {self.accumulation}"
        return f"global {self.global_} = {factors}"


def batch_algebra(batch: BatchConfig, replicas: int) -> Batch:
    """Accumulation from global, micro and the data-parallel degree; what does not divide is refused with the numbers
    that would.
    """
    whole = batch.global_
    if whole % replicas:
        degrees = [r for r in range(1, min(whole, 4 * replicas, 4096) + 1) if whole % r == 0]
        raise ConfigError(
            f"batch.global = {whole} does not divide over data-parallel degree {replicas}",
            f"allowed: batch.global = {multiples(whole, replicas)}, or degree {nearest(degrees, replicas)}",
        )
    local = whole // replicas
    micro = batch.micro or local
    if local % micro:
        sizes = [m for m in range(1, min(local, 4 * micro, 4096) + 1) if local % m == 0]
        raise ConfigError(
            f"batch.micro = {micro} does not divide a rank's {local} samples (global {whole}, degree {replicas})",
            f"allowed: batch.micro = {nearest(sizes, micro)}, or batch.global = {multiples(whole, replicas * micro)}",
        )
    return Batch(whole, micro, replicas, local // micro)


def multiples(wanted: int, unit: int) -> str:
    below = wanted // unit * unit
    return " or ".join(str(v) for v in (below, below + unit) if v > 0)


def identity(config: RunConfig) -> dict[str, Any]:
    """Every setting that changes the numbers, by dotted key."""
    return {key: value for key, value, placed in settings(config) if not placed}


def placement(config: RunConfig) -> dict[str, Any]:
    """Every setting that does not, by dotted key."""
    return {key: value for key, value, placed in settings(config) if placed}


def settings(node: Any, path: str = "") -> list[tuple[str, Any, bool]]:
    """(dotted key, value, is placement) for every leaf of the tree."""
    hints = get_type_hints(type(node), include_extras=True)
    rows: list[tuple[str, Any, bool]] = []
    for f in dataclasses.fields(node):
        value, hint, key = getattr(node, f.name), hints[f.name], path + f.name.rstrip("_")
        placed = get_origin(hint) is Annotated and any(isinstance(m, Placement) for m in get_args(hint)[1:])
        if dataclasses.is_dataclass(value):
            rows.extend((k, v, p or placed) for k, v, p in settings(value, key + "."))
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                rows.extend((k, v, p or placed) for k, v, p in settings(item, f"{key}[{i}]."))
        else:
            rows.append((key, value, placed))
    return rows


def fingerprint(values: dict[str, Any]) -> str:
    """Sixteen hex digits of a canonical JSON text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
