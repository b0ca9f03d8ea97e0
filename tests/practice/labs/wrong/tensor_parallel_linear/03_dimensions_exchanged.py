"""Exchanges the dimensions that the two layers divide. Expected check: shards."""
# ruff: noqa: F401

from meshwright_practice.labs.tensor_parallel_linear.solution import column_linear, mlp, row_linear
from meshwright_practice.labs.tensor_parallel_linear.solution import shard_column as shard_row
from meshwright_practice.labs.tensor_parallel_linear.solution import shard_row as shard_column
