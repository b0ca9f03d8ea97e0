"""The task `logic`: values of formulas, orders from comparisons, and truth tables. Torch-free.

`t` is true and `f` is false; `!` is not, `&` and, `|` or, and `^` exclusive or. Formulas have parentheses around every
operation with two sides, except the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product

from meshwright.rl.tasks.draws import Draws
from meshwright.rl.tasks.task import Problem, Task, TaskLevel

OPERATORS: Mapping[str, Callable[[bool, bool], bool]] = {
    "&": lambda left, right: left and right,
    "|": lambda left, right: left or right,
    "^": lambda left, right: left != right,
}
Assignment = Mapping[str, bool]
CONSTANTS: Assignment = {"t": True, "f": False}


class Formula:
    """A random formula with a number of operations that have two sides."""

    def __init__(
        self, draws: Draws, names: Sequence[str], operations: int, negations: bool, outer: bool = True
    ) -> None:
        self.operator, self.outer = "", outer
        self.negated = negations and draws.integer(0, 2) == 0
        if operations:
            left = draws.integer(0, operations - 1)
            self.operator = draws.choice("&|^")
            sides = (left, operations - 1 - left)
            self.left, self.right = (Formula(draws, names, count, negations, outer=False) for count in sides)
        else:
            self.name = draws.choice(names)

    def text(self) -> str:
        sign = "!" if self.negated else ""
        if not self.operator:
            return f"{sign}{self.name}"
        inside = f"{self.left.text()}{self.operator}{self.right.text()}"
        return inside if self.outer and not self.negated else f"{sign}({inside})"

    def value(self, names: Assignment) -> bool:
        if not self.operator:
            return names[self.name] != self.negated
        return OPERATORS[self.operator](self.left.value(names), self.right.value(names)) != self.negated


def evaluate(operations: int, negations: bool, draws: Draws) -> Problem:
    formula = Formula(draws, "tf", operations, negations)
    return f"{formula.text()}=", truth(formula.value(CONSTANTS))


def evaluate_names(draws: Draws) -> Problem:
    """A formula of names, whose values are given before it."""
    names = {name: bool(draws.integer(0, 1)) for name in "abc"}
    formula = Formula(draws, "abc", 2, negations=True)
    given = " ".join(f"{name}={truth(value)}" for name, value in names.items())
    return f"{given} {formula.text()}=", truth(formula.value(names))


def position_in_order(draws: Draws) -> Problem:
    """Which of three names is first or last, from the two comparisons that say it."""
    order, facts = comparisons(draws, "abc")
    asked = draws.choice(["first", "last"])
    return f"{facts} {asked}=", order[0 if asked == "first" else -1]


def whole_order(draws: Draws) -> Problem:
    """The order of four or five names, from the comparisons of neighbours."""
    order, facts = comparisons(draws, "abcde"[: draws.integer(4, 5)])
    return f"{facts} order=", "".join(order)


def comparisons(draws: Draws, names: str) -> tuple[list[str], str]:
    """A random order of names, and sentences that determine it, also in random order: `b after a`, `c before d`."""
    order = draws.shuffled(names)
    facts = []
    for earlier, later in draws.shuffled(list(pairwise(order))):
        facts.append(f"{later} after {earlier}" if draws.integer(0, 1) else f"{earlier} before {later}")
    return order, " ".join(facts)


def truth_table(draws: Draws) -> Problem:
    """The values of a formula for a, b, c = fff, fft, ftf, ..., ttt."""
    formula = Formula(draws, "abc", 3, negations=True)
    rows = (dict(zip("abc", values, strict=True)) for values in product([False, True], repeat=3))
    return f"table {formula.text()}=", "".join(truth(formula.value(row)) for row in rows)


def negate(draws: Draws) -> Problem:
    value = draws.choice("tf")
    return (f"!{value}=", "tf"[value == "t"]) if draws.integer(0, 1) else (f"{value}=", value)


def formula_length(operations: int) -> int:
    """Characters of the longest formula: every side is negated, and every operation is in parentheses and negated."""
    return len("!a") * (operations + 1) + len("!(&)") * operations


def truth(value: bool) -> str:
    return "t" if value else "f"


LOGIC = Task(
    "logic",
    "abcdetf",
    (
        TaskLevel("a value or its negation", negate, 3, 1),
        TaskLevel("one operation", partial(evaluate, 1, False), 4, 1),
        TaskLevel("one operation, with negations", partial(evaluate, 1, True), formula_length(1) + 1, 1),
        TaskLevel("two operations", partial(evaluate, 2, True), formula_length(2) + 1, 1),
        TaskLevel("four operations", partial(evaluate, 4, True), formula_length(4) + 1, 1),
        TaskLevel("two operations on named values", evaluate_names, len("a=t b=t c=t ") + formula_length(2) + 1, 1),
        TaskLevel("the first or the last of three", position_in_order, 28, 1),
        TaskLevel("the order of four or five", whole_order, 50, 5),
        TaskLevel(
            "the truth table of three operations on three names", truth_table, len("table ") + formula_length(3) + 1, 8
        ),
    ),
)
