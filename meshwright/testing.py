"""For users' own tests: run a function on several ranks, forked warm from the test's process.

from meshwright.testing import run_ranks

def test_sum():
    assert run_ranks(lambda world: int(world.all_reduce(torch.ones(())).wait()), 4) == [4, 4, 4, 4]
"""

from meshwright.launch.ranks import run_ranks
from meshwright.parallel.world import World
from meshwright.recover.failures import RanksFailed

__all__ = ["RanksFailed", "World", "run_ranks"]
