"""Whole matrices have one owner each, with equal work, and every rank derives the same exchange."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.matrix_owners import MatrixOwners, ShardedParameter, region_numel, sharding_of
from meshwright.base.topology.parameter_shapes import ParameterShape

PARAMETERS = [
    ParameterShape("q", (16, 16), "block", tp_dim=0),
    ParameterShape("o", (16, 16), "block", tp_dim=1),
    ParameterShape("router", (4, 16), "block"),
    ParameterShape("bank", (4, 6, 16), "block", is_expert_weight=True),
]
LAYOUTS = [
    Layout(),
    Layout(replicate=4),
    Layout(shard=4),
    Layout(shard=3),
    Layout(tensor=2),
    Layout(shard=2, tensor=2),
    Layout(replicate=2, shard=2),
    Layout(replicate=4, expert=2),
    Layout(shard=4, expert=2),
    Layout(shard=2, context=2, tensor=2, expert=4),
    Layout(pipeline=2, shard=2, tensor=2),
]


def owners_of(layout: Layout, rank: int = 0, **options: int) -> MatrixOwners:
    parameters = [ShardedParameter(p.name, p.shape, sharding_of(p, layout)) for p in PARAMETERS]
    return MatrixOwners(parameters, layout, rank, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_of_a_matrix_reaches_its_owner_once_and_its_result_every_holder(layout):
    owners = owners_of(layout)
    [bucket] = owners.buckets
    assert len(bucket) == 3 + 4
    for owned in bucket:
        assert sum(region_numel(part) for part in owned.holders) == owned.matrix.numel
        assert owned.owner in {rank for ranks in owned.holders.values() for rank in ranks}
        senders = list(owned.senders())
        assert [part for _, part in senders] == list(owned.holders)
        assert all(sender in owned.holders[part] for sender, part in senders)
        for rank, part in owned.receivers():
            assert rank in owned.holders[part]
    sent = [owners.sent_elements(rank) for rank in owners.ranks]
    gathered = [owned for owned in bucket if owned.is_gathered]
    assert sum(to_owners for to_owners, _ in sent) == sum(owned.matrix.numel for owned in gathered)
    received = sum(region_numel(part) for owned in bucket for _, part in owned.receivers())
    assert sum(from_owner for _, from_owner in sent) == received


def test_replicas_gather_nothing_and_send_as_much_as_an_all_gather():
    owners = owners_of(Layout(replicate=4))
    total = sum(matrix.numel for matrix in owners.matrices)
    assert all(owners.sent_elements(rank)[0] == 0 for rank in range(4))
    assert sum(owners.sent_elements(rank)[1] for rank in range(4)) == 4 * total


@pytest.mark.parametrize("layout", [Layout(replicate=4), Layout(shard=4), Layout(shard=2, tensor=2)], ids=str)
def test_work_is_divided_equally(layout):
    parameters = [ShardedParameter(f"{i}", (32, 32 + 8 * (i % 3))) for i in range(24)]
    owners = MatrixOwners(parameters, layout)
    work = [owners.work_of(rank) for rank in owners.ranks]
    assert sum(work) == sum(matrix.work for matrix in owners.matrices)
    assert max(work) <= 1.05 * min(work)


def test_an_expert_is_owned_by_a_rank_that_has_it():
    layout = Layout(replicate=4, expert=2)
    for owned in owners_of(layout).buckets[0]:
        if owned.matrix.expert is not None:
            assert layout.coordinates(owned.owner)["expert"] == owned.matrix.expert // 2
            assert not owned.is_gathered


def test_buckets_are_bounded_and_keep_every_matrix_and_the_bytes():
    layout = Layout(shard=2)
    small, large = owners_of(layout, bucket_elements=128), owners_of(layout)
    assert len(small.buckets) > 1
    assert all(sum(o.matrix.numel for o in bucket) <= 256 for bucket in small.buckets)
    counts = Counter(owned.number for bucket in small.buckets for owned in bucket)
    assert counts == Counter(range(len(large.matrices)))
    assert sum(sum(small.sent_elements(r)) for r in (0, 1)) == sum(sum(large.sent_elements(r)) for r in (0, 1))


def test_pipeline_ranks_have_owners_of_their_own():
    layout = Layout(pipeline=2, shard=2)
    assert owners_of(layout, 0).ranks == [0, 1]
    assert owners_of(layout, 3).ranks == [2, 3]
