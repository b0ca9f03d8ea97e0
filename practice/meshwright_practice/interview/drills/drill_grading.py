"""Grades an answer in five parts: words from the table, numbers against the planner's figures, nothing hidden."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.base.io import format_bytes, format_percent, format_seconds
from meshwright.planner.describe import describe_plan, merged_calls
from meshwright_practice.checks import Check
from meshwright_practice.interview.drills.case_figures import (
    DrillCase,
    JudgedRemedy,
    communication_figures,
    price_figures,
    problem_figures,
)
from meshwright_practice.interview.drills.quantities import Figure, agreeing, quantities
from meshwright_practice.interview.drills.scenarios import PARTS
from meshwright_practice.interview.drills.vocabulary import (
    COLLECTIVES,
    LIMITS,
    METRICS,
    PRICES,
    STATE,
    STRATEGIES,
    asserted,
    asserted_names,
)

FACTOR = 1.5
"""A number agrees with a figure of the planner up to this factor."""


def grade_answer(case: DrillCase, answer: Mapping[str, str]) -> list[Check]:
    """One check per requirement, named part.requirement. Without a remedy of its own, an answer's other parts are
    compared with every remedy that helps.
    """
    chosen, strategy_check = choose_remedy(case, answer["mechanism"])
    judged = [chosen] if chosen is not None else [each for each in case.remedies if each.helps]
    strategies = {name for each in judged for name in each.remedy.strategies}
    state, price = ("|".join(table[name] for name in sorted(strategies)) for table in (STATE, PRICES))
    sent = [figure for each in judged for figure in communication_figures(each.estimate)]
    costs = [figure for each in judged for figure in price_figures(case, each.estimate)]
    limit = case.scenario.limit
    given = (Figure("memory of a device", case.now.job.cluster.device.memory, "bytes"),)
    checks = [
        words("problem.limit", LIMITS[limit], answer["problem"], f"what limits the job: {limit}"),
        number("problem.figure", answer["problem"], problem_figures(case), given),
        strategy_check,
        words("mechanism.state", state, answer["mechanism"], "the state that moves, is sharded or is recomputed"),
        min(
            (collectives(each, answer["communication"]) for each in judged),
            key=lambda check: (not check.passed, check.message),
        ),
        number("communication.bytes", answer["communication"], sent),
        words("tradeoff.price", price, answer["tradeoff"], "what the change costs"),
        number("tradeoff.figure", answer["tradeoff"], costs),
        words("measurement.metric", METRICS, answer["measurement"], "the metric that shows whether it worked"),
    ]
    return [*checks, *wrong_statements(case, answer)]


def choose_remedy(case: DrillCase, text: str) -> tuple[JudgedRemedy | None, Check]:
    """The remedy that the answer names, and whether the planner agrees that it helps."""
    named = {name for name in asserted_names(STRATEGIES, text) if name != "ddp"}
    known = {name for each in case.remedies for name in each.remedy.strategies}
    relevant = named & known
    relevant -= implied(relevant)
    if case.scenario.limit == "batch" and "accumulation" in relevant:
        relevant = {"accumulation"}  # an answer compares it with a larger micro-batch
    matching = [each for each in case.remedies if set(each.remedy.strategies) == relevant]
    beside = {"bf16_reduction"} if relevant else set()  # the dtype of a collective that another strategy needs
    foreign = sorted(named - known - implied(named) - in_use(case) - beside)
    expected = "a change that removes the limit: " + " or ".join(
        " + ".join(each.remedy.strategies) for each in case.remedies if each.helps
    )
    chosen = matching[0] if matching else None
    message = ""
    if not named:
        found, message = "none", "Name the one change that you make, in the words of the field."
    elif foreign:
        found = " + ".join(sorted(named))
        message = f"{', '.join(foreign)} does not remove this limit; introduce only what does."
    elif chosen is None:
        found = " + ".join(sorted(named))
        message = "This is not one change but a list: choose the smallest that removes the limit."
    else:
        found = describe_plan(chosen.estimate.job) + "; gradients all-reduced in bfloat16" * chosen.remedy.compress
        message = "" if chosen.helps else refusal(chosen)
    return chosen if chosen is not None and not foreign else None, Check(
        "mechanism.strategy", not message, expected, found, message
    )


def implied(named: set[str]) -> set[str]:
    """Words that belong to a strategy although they are in another row of the table."""
    rows = {"micro_batches": {"accumulation"}, "accumulation": {"micro_batches"}, "fsdp": {"zero"}}
    return {other for name in named for other in rows.get(name, set())}


def in_use(case: DrillCase) -> set[str]:
    """The strategies of the situation: to name one of them is not to introduce it."""
    layout = case.now.job.layout
    used = {
        "pipeline": layout.pipeline > 1,
        "tensor": layout.tensor > 1,
        "fsdp": layout.shard > 1,
        "zero": layout.shard > 1,
    }
    return {name for name, is_used in used.items() if is_used}


def refusal(chosen: JudgedRemedy) -> str:
    memory, device = chosen.estimate.peak_memory.total, chosen.estimate.job.cluster.device.memory
    if memory > device:
        return f"With it a rank still needs {format_bytes(memory)} of {format_bytes(device)}."
    return f"With it a step takes {format_seconds(chosen.estimate.seconds)}, and the share that is lost does not fall."


def words(name: str, pattern: str, text: str, expected: str) -> Check:
    found = asserted(pattern, text)
    message = "" if found else f"Say {expected}." if text.strip() else f"The part {name.partition('.')[0]} is empty."
    return Check(name, found, expected, "named" if found else "not named", message)


def number(name: str, text: str, figures: list[Figure], given: tuple[Figure, ...] = ()) -> Check:
    """A number with a unit within FACTOR of one of the planner's figures."""
    agreed = agreeing(text, figures, FACTOR, given)
    shown = "; ".join(f"{figure.name} {format_figure(figure)}" for figure in figures[:4] if figure.value > 0)
    expected = f"a number with a unit within a factor of {FACTOR:g} of the planner's: {shown}"
    if agreed is not None:
        quantity, figure = agreed
        return Check(name, True, expected, f"{quantity.text.strip()}: {figure.name} is {format_figure(figure)}")
    stated = [quantity.text.strip() for quantity in quantities(text)]
    message = "State a number with its unit." if not stated else "None of your numbers is near a figure of this case."
    return Check(name, False, expected, ", ".join(stated[:6]) or "no number with a unit", message)


def format_figure(figure: Figure) -> str:
    match figure.dimension:
        case "bytes":
            return format_bytes(figure.value)
        case "seconds":
            return format_seconds(figure.value)
        case "share":
            return format_percent(figure.value)
    return f"{figure.value:.3g} x"


def collectives(judged: JudgedRemedy, text: str) -> Check:
    """At least one collective of the plan is named, and none that it does not have."""
    calls = merged_calls(judged.estimate)
    present = {call.collective for call in calls}
    named = asserted_names(COLLECTIVES, text)
    # A ring all-reduce is a reduce-scatter and an all-gather: to say so is not wrong.
    tolerated = {"reduce_scatter", "all_gather"} if "all_reduce" in present else set()
    wrong = [name for name in named if name not in present | tolerated]
    right = [name for name in named if name in present]
    expected = "the collectives of the plan: " + ", ".join(sorted({f"{call.axis} {call.collective}" for call in calls}))
    message = ""
    if not right:
        message = "Name the collective that moves the bytes."
    elif wrong:
        message = f"The plan has no {', '.join(wrong)}."
    return Check("communication.collective", not message, expected, ", ".join(named) or "none", message)


def wrong_statements(case: DrillCase, answer: Mapping[str, str]) -> list[Check]:
    """A failed check for every statement that is known to be wrong in this scenario."""
    found = []
    for part in PARTS:
        for pattern, right in case.scenario.wrong:
            if asserted(pattern, answer[part]):
                found.append(Check(f"{part}.wrong_statement", False, "no wrong statement", "a wrong statement", right))
    return found


def scores(checks: list[Check]) -> dict[str, float]:
    """part -> share of its requirements that are met."""
    table = {}
    for part in PARTS:
        mine = [check.passed for check in checks if check.name.partition(".")[0] == part]
        table[part] = sum(mine) / len(mine)
    return table
