"""When FSDP2 gathers the units of a pipeline's stages, and lets go of them: it follows from the order of the schedule.

| when | of a stage's units |
|---|---|
| F | each is gathered unless it is, and let go after its use where parameters are sharded |
| B, I, W | each is gathered unless it is, and stays |
| after the stage's last B or W | gradients meet, unit by unit, and all are let go |
| several stages a rank: before a stage's first action | all are gathered at once |
| several stages a rank: a stage is not among the next three in use | all are let go |

The last two are torch's runtime of several stages (`_add_unshard_reshard`). With
`fsdp.reshard_after_forward` a unit that F lets go of stays divided among fewer ranks, and comes back from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshwright.config import Batch, RunConfig
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.schedule_orders import Action, action_orders, flatten_actions

AHEAD = 3
UnitNests = list[list[str]]
"""Units in the order of use, each with those inside it."""


def order_of(config: RunConfig, layout: Layout, batch: Batch, rank: int) -> list[Action]:
    place, kind = layout.coordinates(rank)["pipeline"], config.pipeline.schedule
    return list(
        flatten_actions(action_orders(kind, layout.pipeline, batch.accumulation, stages_per_rank(config))[place])
    )


def last_of(order: list[Action]) -> dict[int, int]:
    """Of each stage the place of the action after which its gradients meet."""
    return {action.stage: place for place, action in enumerate(order) if action.op in ("B", "W")}


class UnshardTimeline:
    """The units of a rank's stages through a step: how often each is gathered, and the most bytes that are held of
    them at once, beside the shards.
    """

    def __init__(
        self, stages: dict[int, UnitNests], whole: dict[str, int], part: dict[str, int], lets_go: bool
    ) -> None:
        """`part`: bytes of a unit that stay after F; none where all shards are needed to gather it again."""
        self.stages, self.whole, self.part, self.lets_go = stages, whole, part, lets_go
        self.now = dict.fromkeys(whole, "shards")
        self.held = self.peak = 0
        self.gathers: Counter[tuple[str, str]] = Counter()
        """by unit, and from what: shards or a part"""

    def run(self, order: list[Action], several: bool) -> UnshardTimeline:
        active: set[int] = set()
        last = last_of(order)
        for place, action in enumerate(order):
            if several:
                for stage in active - next_stages(order[place:]):
                    active.remove(stage)
                    self.drop(stage)
                if action.stage not in active:
                    active.add(action.stage)
                    self.gather(unit for nest in self.stages[action.stage] for unit in nest)
            if action.op == "F":
                self.forward(self.stages[action.stage])
            else:
                self.gather(unit for nest in reversed(self.stages[action.stage]) for unit in nest)
            if last[action.stage] == place:
                self.drop(action.stage)
        return self

    def forward(self, nests: UnitNests) -> None:
        for nest in nests:
            self.gather(nest)
            for unit in reversed(nest) if self.lets_go else ():
                self.hold(self.part.get(unit, 0))
                self.held -= self.whole[unit]
                self.now[unit] = "part" if unit in self.part else "shards"

    def gather(self, units: Iterable[str]) -> None:
        for unit in units:
            if self.now[unit] != "whole":
                self.gathers[unit, self.now[unit]] += 1
                self.hold(self.whole[unit])
                self.held -= self.part[unit] if self.now[unit] == "part" else 0
                self.now[unit] = "whole"

    def drop(self, stage: int) -> None:
        for unit in (unit for nest in self.stages[stage] for unit in nest):
            self.held -= {"whole": self.whole[unit], "part": self.part.get(unit, 0), "shards": 0}[self.now[unit]]
            self.now[unit] = "shards"

    def hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


def next_stages(order: list[Action]) -> set[int]:
    found: dict[int, None] = {}
    for action in order:
        found[action.stage] = None
        if len(found) == AHEAD:
            break
    return set(found)


def nests_of(units: Iterable[str]) -> UnitNests:
    """A bank lies inside the block that it is named after."""
    nests: UnitNests = []
    for unit in units:
        if nests and unit.startswith(f"{nests[-1][0]}."):
            nests[-1].append(unit)
        else:
            nests.append([unit])
    return nests
