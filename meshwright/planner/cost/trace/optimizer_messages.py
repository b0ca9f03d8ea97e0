"""Message bytes of the optimizer's own collectives in one step; exact, torch-free.

The group is that of the ranks that update the same parameters: all ranks, or those of a pipeline rank.

| rule | message bytes of one rank |
|---|---|
| muon | all-to-all: its parts of the matrices of other owners, and for its own matrices the parts of all ranks |
| adafactor, if parameters are sharded | all-reduce: rows, columns and three numbers of every matrix, two of a vector |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from meshwright.base.config import RunConfig
from meshwright.base.config.dtypes import parameter_bytes
from meshwright.base.models.spec import ModelSpec
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import OPTIMIZER_AXIS, MatrixOwners, ShardedParameter, sharding_of
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, update_rule
from meshwright.base.topology.parameter_shards import ParameterShard


def optimizer_messages(
    config: RunConfig, layout: Layout, spec: ModelSpec, shards: Sequence[ParameterShard], rank: int
) -> Counter[tuple[str, str]]:
    """The bytes of one rank, which has these shards."""
    messages: Counter[tuple[str, str]] = Counter()
    if layout.ranks == layout.pipeline:
        return messages
    size, by_rule = parameter_bytes(config), dict[str, list[ShardedParameter]]()
    for shard in shards:
        parameter = spec.by_name[shard.name]
        if parameter.trainable and not shard.is_tied_copy:
            rule = update_rule(config.optimizer, shard.name, shard.shape, parameter.unit not in OUTSIDE_BLOCKS)
            sharded = ShardedParameter(shard.name, parameter.shape, sharding_of(parameter, layout))
            by_rule.setdefault(rule, []).append(sharded)
    if matrices := by_rule.get("muon"):
        to_owners, from_owner = owners_of(tuple(matrices), layout, rank - position(layout, rank)).sent_elements(rank)
        messages[OPTIMIZER_AXIS, "all_to_all"] += (to_owners + from_owner) * size
    if any(parameter.sharding for parameter in by_rule.get("adafactor", ())):
        messages[OPTIMIZER_AXIS, "all_reduce"] += sum(adafactor_sums(p.shape) for p in by_rule["adafactor"]) * size
    return messages


def position(layout: Layout, rank: int) -> int:
    """The index of a rank among the ranks of its pipeline rank."""
    return rank % (layout.ranks // layout.pipeline)


@lru_cache(maxsize=64)
def owners_of(parameters: tuple[ShardedParameter, ...], layout: Layout, rank: int) -> MatrixOwners:
    """Cached, since every rank of a group has the same owners."""
    return MatrixOwners(parameters, layout, rank)


def adafactor_sums(shape: tuple[int, ...]) -> int:
    """The elements of all sums of one parameter: its squares and those of its update, and for a matrix the squares of
    the rows and columns of its gradient, and the second moments of its rows.
    """
    totals = shape[0] if len(shape) == 3 else 1
    if len(shape) < 2:
        return 2 * totals
    stack = prod(shape[:-2])
    return 2 * totals + stack * (shape[-2] + shape[-1] + 1)
