"""Runs a function on several forked ranks, for users' own tests.

The ranks are forked from the test's process, so starting them takes milliseconds and the function may be a closure:

    def test_all_reduce():
        assert run_ranks(lambda world: int(world.all_reduce(torch.ones(())).wait()), 4) == [4, 4, 4, 4]
"""

from meshwright.base.records.failures import RanksFailed
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World

__all__ = ["RanksFailed", "World", "run_ranks"]
