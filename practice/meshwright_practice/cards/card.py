"""What a card is: a question, its answer, and the experiment that decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Literal

from meshwright_practice.pictures import Picture

Kind = Literal["state placement", "communication", "schedule", "numerics", "data", "recovery", "diagnosis", "judgement"]
Comparison = Literal["==", "!=", "<", "<=", ">", ">="]
INVERSE: dict[Comparison, Comparison] = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", "<=": ">", ">": "<="}
EXPERIMENTS = "meshwright_practice.experiments"
KnobValue = int | float | str | bool
Knobs = Mapping[str, KnobValue]


@dataclass(frozen=True)
class Knob:
    """A setting of an experiment that the reader may change. The first value is the default."""

    name: str
    values: tuple[KnobValue, ...]
    meaning: str


@dataclass(frozen=True)
class Observation:
    """What an experiment has measured. Relations, predictions and claims refer to `values` by name."""

    values: Mapping[str, float]
    picture: Picture
    notes: tuple[str, ...] = ()
    """sentences about this run, for the terminal and the page"""


@dataclass(frozen=True)
class Relation:
    """A statement about an observation that can be false: `left` compared with `right`. A side is the name of a
    value or a number; `tolerance` is relative to `right`: it widens ==, <= and >=, and narrows !=, < and >.
    """

    text: str
    left: str
    comparison: Comparison
    right: str | float
    tolerance: float = 0.0

    def holds(self, values: Mapping[str, float]) -> bool:
        left = values[self.left]
        right = values[self.right] if isinstance(self.right, str) else self.right
        slack = self.tolerance * abs(right)
        match self.comparison:
            case "==":
                return abs(left - right) <= slack
            case "<=":
                return left <= right + slack
            case ">=":
                return left >= right - slack
            case _:
                return not self.inverted().holds(values)

    def inverted(self) -> Relation:
        """The statement that is true exactly where this one is false."""
        return replace(self, comparison=INVERSE[self.comparison])


@dataclass(frozen=True)
class Prediction:
    """A number that the reader states before the run: the value of the observation with the name `value`."""

    value: str
    question: str
    unit: str
    tolerance: float = 0.02
    """relative error up to which the prediction counts as exact"""


@dataclass(frozen=True)
class Statement:
    """A sentence to choose or to reject, which the observation decides: it is true where `relation` holds."""

    text: str
    relation: Relation


@dataclass(frozen=True)
class Citation:
    """Where a fact comes from. The source of an own run is the command that prints it."""

    kind: Literal["official", "paper", "own run"]
    title: str
    where: str


@dataclass(frozen=True)
class Experiment:
    """A run on `ranks` local ranks, through the parts that train. `run` names its function, such as numerics:formats
    for `formats` in practice/meshwright_practice/experiments/numerics.py, so that reading a card does not import torch.
    """

    run: str
    ranks: int = 1
    knobs: tuple[Knob, ...] = ()

    def load(self, package: str = EXPERIMENTS) -> Callable[[Knobs], Observation]:
        module, _, function = self.run.partition(":")
        run: Callable[[Knobs], Observation] = getattr(import_module(f"{package}.{module}"), function)
        return run

    def defaults(self) -> dict[str, KnobValue]:
        return {knob.name: knob.values[0] for knob in self.knobs}

    def ranks_with(self, knobs: Knobs) -> int:
        """The local ranks of a run. The knob `ranks` sets them, unless it is the size of a cluster that is computed."""
        is_local = self.defaults().get("ranks") == self.ranks
        return int(knobs["ranks"]) if is_local and "ranks" in knobs else self.ranks


@dataclass(frozen=True)
class Card:
    """One card. A card with `predictions` is graded by their error, one with `claims` by the choice among them.

    `relations` must hold in every run with the default knobs. `refuted` are the common wrong statements about it:
    they must be false.
    """

    id: str
    kind: Kind
    question: str
    answer: str
    notes: str
    mistake: str
    experiment: Experiment
    relations: tuple[Relation, ...]
    predictions: tuple[Prediction, ...] = ()
    claims: tuple[Statement, ...] = ()
    refuted: tuple[Relation, ...] = ()
    sources: tuple[Citation, ...] = ()
    items: tuple[int, ...] = field(default=())
    """numbers of the handbook items that this card makes real"""
    chapter: str = ""
    """page of the handbook, such as handbook/sharding.md"""

    def can_judge(self, relation: Relation, knobs: Knobs) -> bool:
        """Whether a run with these knobs decides a relation: a number on its right is one for the default knobs."""
        return isinstance(relation.right, str) or dict(knobs) == self.experiment.defaults()

    def can_grade(self, knobs: Knobs) -> bool:
        """Whether a run with these knobs decides every relation, wrong statement and claim of the card."""
        relations = [*self.relations, *self.refuted, *(claim.relation for claim in self.claims)]
        return all(self.can_judge(relation, knobs) for relation in relations)

    def broken(self, values: Mapping[str, float]) -> list[Relation]:
        """The relations that do not hold, and the wrong statements that do."""
        false = [relation for relation in self.relations if not relation.holds(values)]
        return false + [relation for relation in self.refuted if relation.holds(values)]
