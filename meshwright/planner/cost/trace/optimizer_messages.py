"""Message bytes of the optimizer's own collectives in one step; exact, torch-free.

The group is that of the ranks that update the same parameters: all ranks, or those of a pipeline rank.

| a rule that | message bytes of one rank |
|---|---|
| needs whole matrices | all-to-all: its parts of matrices of other owners, and the parts of all ranks of its own |
| declares sums, if parameters are sharded | all-reduce: the elements of these sums |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import parameter_bytes
from meshwright.base.models.spec import ModelSpec
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import OPTIMIZER_AXIS, MatrixOwners, ShardedParameter, sharding_of
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, rule_declaration, update_rule
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
    for rule, parameters in by_rule.items():
        declared = rule_declaration(rule)
        if declared.whole_matrices:
            owners = owners_of(tuple(parameters), layout, rank - position(layout, rank))
            messages[OPTIMIZER_AXIS, "all_to_all"] += sum(owners.sent_elements(rank)) * size
        if declared.sums is not None and any(parameter.sharding for parameter in parameters):
            messages[OPTIMIZER_AXIS, "all_reduce"] += sum(declared.sums(p.shape) for p in parameters) * size
    return messages


def position(layout: Layout, rank: int) -> int:
    """The index of a rank among the ranks of its pipeline rank."""
    return rank % (layout.ranks // layout.pipeline)


@lru_cache(maxsize=64)
def owners_of(parameters: tuple[ShardedParameter, ...], layout: Layout, rank: int) -> MatrixOwners:
    """Cached, since every rank of a group has the same owners."""
    return MatrixOwners(parameters, layout, rank)
