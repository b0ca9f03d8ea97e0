"""When FSDP2 unshards and reshards the units of a rank's pipeline stages: it follows from the schedule.

| action | units of the stage |
|---|---|
| F | each is unsharded if necessary, and resharded after its use if parameters are sharded |
| B, I, W | each is unsharded if necessary, and stays unsharded |
| after the stage's last B or W | gradients are reduced unit by unit, and all units are resharded |
| several stages per rank: before a stage's first action | all are unsharded together |
| several stages per rank: the stage is not among the next three in use | all are resharded |

The last two rows are torch's runtime for several stages per rank (`_add_unshard_reshard`). If `reshard_after_forward`
is a number of ranks, F leaves a unit sharded over that many ranks, and backward all-gathers it from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshwright.config import Batch, RunConfig
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.schedule_orders import Action, action_orders, flatten_actions

LOOKAHEAD_STAGES = 3
UnitNests = list[list[str]]
"""FSDP units in the order of use, each followed by the units nested in it."""


def rank_actions(config: RunConfig, layout: Layout, batch: Batch, rank: int) -> list[Action]:
    pipeline_rank, kind = layout.coordinates(rank)["pipeline"], config.pipeline.schedule
    orders = action_orders(kind, layout.pipeline, batch.accumulation, stages_per_rank(config))
    return list(flatten_actions(orders[pipeline_rank]))


def last_backward(actions: list[Action]) -> dict[int, int]:
    """By stage, the index of the action after which its gradients are reduced."""
    return {action.stage: index for index, action in enumerate(actions) if action.op in ("B", "W")}


class UnshardTimeline:
    """Follows the FSDP units of a rank's stages through a step: how often each is all-gathered, and the peak bytes of
    unsharded units in addition to the shards.
    """

    def __init__(
        self,
        stages: dict[int, UnitNests],
        unsharded: dict[str, int],
        resharded: dict[str, int],
        reshard_after_forward: bool,
    ) -> None:
        """`unsharded` and `resharded` are the bytes of each unit in that state; a unit without an entry in `resharded`
        keeps nothing but its shard after forward.
        """
        self.stages, self.unsharded, self.resharded = stages, unsharded, resharded
        self.reshard_after_forward = reshard_after_forward
        self.state = dict.fromkeys(unsharded, "sharded")
        self.resident = self.peak = 0
        self.all_gathers: Counter[tuple[str, str]] = Counter()
        """counts by unit and by the state that it is gathered from: sharded or resharded"""

    def run(self, actions: list[Action], several_stages: bool) -> UnshardTimeline:
        active: set[int] = set()
        last = last_backward(actions)
        for index, action in enumerate(actions):
            if several_stages:
                for stage in active - next_stages(actions[index:]):
                    active.remove(stage)
                    self.reshard(stage)
                if action.stage not in active:
                    active.add(action.stage)
                    self.unshard(unit for nest in self.stages[action.stage] for unit in nest)
            if action.op == "F":
                self.forward(self.stages[action.stage])
            else:
                self.unshard(unit for nest in reversed(self.stages[action.stage]) for unit in nest)
            if last[action.stage] == index:
                self.reshard(action.stage)
        return self

    def forward(self, nests: UnitNests) -> None:
        for nest in nests:
            self.unshard(nest)
            for unit in reversed(nest) if self.reshard_after_forward else ():
                self.allocate(self.resharded.get(unit, 0))
                self.resident -= self.unsharded[unit]
                self.state[unit] = "resharded" if unit in self.resharded else "sharded"

    def unshard(self, units: Iterable[str]) -> None:
        for unit in units:
            if self.state[unit] != "unsharded":
                self.all_gathers[unit, self.state[unit]] += 1
                self.allocate(self.unsharded[unit])
                self.resident -= self.resharded[unit] if self.state[unit] == "resharded" else 0
                self.state[unit] = "unsharded"

    def reshard(self, stage: int) -> None:
        for unit in (unit for nest in self.stages[stage] for unit in nest):
            sizes = {"unsharded": self.unsharded[unit], "resharded": self.resharded.get(unit, 0), "sharded": 0}
            self.resident -= sizes[self.state[unit]]
            self.state[unit] = "sharded"

    def allocate(self, size: int) -> None:
        self.resident += size
        self.peak = max(self.peak, self.resident)


def next_stages(actions: list[Action]) -> set[int]:
    """The stages of the next actions, up to torch's lookahead."""
    stages: dict[int, None] = {}
    for action in actions:
        stages[action.stage] = None
        if len(stages) == LOOKAHEAD_STAGES:
            break
    return set(stages)


def nest_units(units: Iterable[str]) -> UnitNests:
    """Groups the units: expert weights in a unit of their own are nested in their block, whose name they extend."""
    nests: UnitNests = []
    for unit in units:
        if nests and unit.startswith(f"{nests[-1][0]}."):
            nests[-1].append(unit)
        else:
            nests.append([unit])
    return nests
