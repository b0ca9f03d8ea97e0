"""Runs a function on several ranks, for your own tests.

The ranks are forked from the test's process, so starting them takes milliseconds and the function may be a closure:

    from meshwright.testing import run_ranks

    def test_all_reduce():
        assert run_ranks(lambda world: int(world.all_reduce(torch.ones(())).wait()), 4) == [4, 4, 4, 4]

`run_ranks` returns one result per rank and raises `RanksFailed` if a rank raises.
"""

from meshwright.launch.ranks import run_ranks
from meshwright.parallel.world import World
from meshwright.recover.failures import RanksFailed

__all__ = ["RanksFailed", "World", "run_ranks"]
