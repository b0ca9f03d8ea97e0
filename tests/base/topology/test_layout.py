"""Layouts: coordinates and groups of ranks, and the tables of axes and collectives."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from meshwright.base.config import LayoutConfig, load_config
from meshwright.base.hardware import cluster_file
from meshwright.base.topology.axes import ALL_AXES, AXES, AXIS_TABLE, DATA_AXES
from meshwright.base.topology.collectives import COLLECTIVES, find_collective
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError

CUBE = Layout(pipeline=2, replicate=2, shard=2, context=2, tensor=2)


def test_axis_table_has_the_fields_of_layout_and_the_keys_of_the_config():
    assert tuple(field.name for field in fields(Layout)) == ALL_AXES
    assert AXES == ("pipeline", "replicate", "shard", "context", "tensor")
    assert DATA_AXES == ("replicate", "shard")
    for axis in AXIS_TABLE:
        section, key = axis.config_key.split(".")
        assert hasattr(getattr(load_config(), section), key), axis.config_key


def test_cluster_files_know_collectives_of_the_table():
    assert set(get_args(cluster_file.Collective)) <= set(COLLECTIVES)


def test_every_operator_prefix_belongs_to_one_collective():
    for collective in COLLECTIVES.values():
        assert all(find_collective(operator) == collective.name for operator in collective.operators)
    assert find_collective("allgather_base_") == "all_gather"
    assert find_collective("gather") is None


def test_data_coordinates_of_a_pure_replicate_layout():
    layout = Layout(replicate=4)
    assert layout.ranks == layout.data_degree == 4
    assert [layout.data_coordinate(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert layout.group(2, "replicate") == [0, 1, 2, 3]
    assert str(layout) == "replicate 4"


def test_coordinates_of_a_rank_outside_of_the_layout_raise():
    with pytest.raises(ValueError, match="rank 4 is outside of the layout's 4 ranks"):
        Layout(replicate=4).coordinates(4)


def test_tensor_is_the_innermost_axis_and_pipeline_the_outermost():
    assert CUBE.ranks == 32
    assert CUBE.group(0, "tensor") == [0, 1]
    assert CUBE.group(0, "context") == [0, 2]
    assert CUBE.group(0, "shard") == [0, 4]
    assert CUBE.group(0, "replicate") == [0, 8]
    assert CUBE.group(0, "pipeline") == [0, 16]


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_partition_the_ranks(axis):
    groups = list(CUBE.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(32))
    for group in groups:
        for rank in group:
            assert CUBE.group(rank, axis) == group


def test_one_rank_per_slice_of_the_global_batch_counts_tokens():
    assert CUBE.data_degree == 4
    for rank in range(CUBE.ranks):
        peers = CUBE.group(rank, "tensor", "context", "pipeline")
        assert {CUBE.data_coordinate(peer) for peer in peers} == {CUBE.data_coordinate(rank)}
        assert sum(CUBE.counts_tokens(peer) for peer in peers) == 1
    readers = [CUBE.reader_rank(coordinate) for coordinate in range(4)]
    assert [CUBE.data_coordinate(rank) for rank in readers] == [0, 1, 2, 3]
    assert all(CUBE.counts_tokens(rank) for rank in readers)


def test_expert_groups_are_consecutive_data_parallel_ranks():
    layout = Layout(replicate=2, shard=4, tensor=2, expert=4)
    assert layout.ranks == 16
    assert layout.group(0, "expert") == [0, 2, 4, 6]
    assert layout.group(9, "expert") == [9, 11, 13, 15]


def test_sharding_without_shard_degree_divides_the_replicas():
    assert Layout.from_config(LayoutConfig(replicate=4, shard="parameters")) == Layout(shard=4)
    config = LayoutConfig(replicate=2, shard="optimizer", shard_degree=4)
    assert Layout.from_config(config) == Layout(replicate=2, shard=4)
    assert Layout.from_config(LayoutConfig(replicate=2, tensor=2)) == Layout(replicate=2, tensor=2)


@pytest.mark.parametrize(
    ("overrides", "ranks", "layout"),
    [
        ([], 4, Layout(replicate=4)),
        (["--layout.shard=zero-3"], 4, Layout(shard=4)),
        (["--layout.tensor=2"], 4, Layout(replicate=2, tensor=2)),
        (["--layout.shard=zero-1", "--layout.shard_degree=2", "--layout.tensor=2"], 8, Layout(1, 2, 2, 1, 2)),
    ],
)
def test_the_number_of_ranks_sets_the_replicas(overrides, ranks, layout):
    assert Layout.from_config(load_config(overrides=overrides, ranks=ranks).layout) == layout


def test_ranks_that_the_layout_does_not_divide_raise_with_the_nearest_numbers():
    with pytest.raises(ConfigError, match=r"6 ranks.*tensor.*4.*4 or 8"):
        load_config(overrides=["--layout.tensor=4"], ranks=6)
