"""A card on the terminal: the question, what was measured, and the explanation. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_bytes, format_percent, format_seconds, printable
from meshwright_practice.cards.answers import shown_claims
from meshwright_practice.cards.card import Card, Knobs, Relation
from meshwright_practice.cards.grading import Grade, Rating
from meshwright_practice.cards.runner import ExperimentRun
from meshwright_practice.cards.verify import find_problems, named_values
from meshwright_practice.drawing.draw import draw
from meshwright_practice.drawing.palette import LONG_UNIT, format_figure, format_number

RATING_STYLES = {Rating.AGAIN: "bold red", Rating.HARD: "yellow", Rating.GOOD: "green", Rating.EASY: "bold green"}
MAX_WIDTH = 100
DEFAULTS_ONLY = "Relations with a number (·) are stated for the default settings; this run does not decide them."
SYMBOLS = {"==": "=", "!=": "≠", "<=": "≤", ">=": "≥", "<": "<", ">": ">"}


def prose(text: str, style: str = "") -> Text:
    """Text in which `code` is highlighted; a single line break is a space, as in Markdown."""
    joined = re.sub(r"(?<!\n)\n(?!\n|[-*0-9])", " ", printable(text.strip()))
    return Text("").join(
        Text(part, style="bold cyan" if number % 2 else style) for number, part in enumerate(joined.split("`"))
    )


def section(title: str, body: RenderableType) -> Group:
    return Group(Text(""), Text(title, "bold"), Padding(body, (0, 0, 0, 2)))


def question_view(card: Card, knobs: Knobs, position: str = "") -> Group:
    """The question with the settings of its experiment, and the claims to choose from."""
    title = f"{position}{card.kind} · {card.id}"
    parts: list[RenderableType] = [Rule(title, style="dim", align="left"), Text(""), prose(card.question, "bold")]
    count = card.experiment.ranks_with(knobs)
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    settings = ", ".join(f"{name} = {value}" for name, value in knobs.items())
    where = f"The experiment runs on {ranks} of this machine{', with ' if settings else ''}{settings}."
    parts.append(Padding(Text(where, "dim"), (1, 0, 0, 0)))
    if card.claims:
        parts.append(Text(""))
        parts += [Padding(prose(f"{letter})  {claim.text}"), (0, 0, 0, 2)) for letter, claim in shown_claims(card)]
    return Group(*parts)


def run_view(card: Card, run: ExperimentRun, console: Console) -> Group:
    """What an experiment has measured: the picture, its notes and the relations, or why there is nothing."""
    if run.observation is None:
        parts: list[RenderableType] = [Text(f"The experiment has no result: {printable(run.failure)}.", "bold red")]
        if run.log:
            parts.append(Padding(Text(printable(run.log), "dim"), (0, 0, 0, 2)))
        return Group(*parts)
    values = run.observation.values
    parts = [draw(run.observation.picture, console)]
    parts += [Padding(prose(note, "dim"), (0, 0, 0, 2)) for note in run.observation.notes]
    parts.append(Text(""))
    problems = find_problems(card, run)
    if named_values(card) <= values.keys():
        parts.append(relation_table(card, run.knobs, values))
        if not card.can_grade(run.knobs):
            parts.append(Text(DEFAULTS_ONLY, "dim"))
    memory = f", peak memory {format_bytes(run.peak_bytes)}" if run.peak_bytes else ""
    cost = f"{format_seconds(run.seconds)}{memory}"
    parts.append(Text(f"The experiment took {cost}.", "dim"))
    if problems:
        parts += [
            Text(""),
            Text(f" THE CARD {card.id} IS WRONG ON THIS MACHINE. Please report it. ", "bold white on red"),
        ]
        parts += [Text(f"✗ {problem}", "bold red") for problem in problems]
    return Group(*parts)


def relation_table(card: Card, knobs: Knobs, values: Mapping[str, float]) -> Table:
    """The relations with their measured sides; a wrong statement is shown as refuted. A relation that this run does not
    decide is shown with what was measured.
    """
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column()
    for relation, must_hold in [(item, True) for item in card.relations] + [(item, False) for item in card.refuted]:
        if not card.can_judge(relation, knobs):
            table.add_row(Text("·", "dim"), prose(relation.text).append(f"  {measured_side(relation, values)}", "dim"))
            continue
        holds = relation.holds(values)
        mark, style = ("✓", "green") if holds == must_hold else ("✗", "bold red")
        verdict = "does not hold" if must_hold else "NOT refuted" if holds else "refuted"
        text = prose(relation.text)
        if not (must_hold and holds):
            text.append(f" — {verdict}", style)
        table.add_row(Text(mark, style), text.append(f"  {sides(relation, values)}", "dim"))
    return table


def sides(relation: Relation, values: Mapping[str, float]) -> str:
    """The measured sides of a relation, as they are: a relation that does not hold is shown as its inverse."""
    shown = relation if relation.holds(values) else relation.inverted()
    right = values[relation.right] if isinstance(relation.right, str) else relation.right
    word = "within" if shown.comparison in ("==", "<=", ">=") else "by more than"
    tolerance = f" {word} {100 * relation.tolerance:g}%" if relation.tolerance else ""
    named = f" ({relation.right})" if isinstance(relation.right, str) else ""
    return f"{measured_side(relation, values)} {SYMBOLS[shown.comparison]} {format_number(right)}{named}{tolerance}"


def measured_side(relation: Relation, values: Mapping[str, float]) -> str:
    return f"{format_number(values[relation.left])} ({relation.left})"


def grade_view(graded: Grade) -> Group:
    """Predicted beside measured, and the claims that were judged rightly or wrongly."""
    parts: list[RenderableType] = []
    if graded.predictions:
        table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("predicted", "measured", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in graded.predictions:
            unit = item.prediction.unit
            figures = (format_figure(item.predicted, unit), format_figure(item.measured, unit))
            error = Text(format_error(item.error), RATING_STYLES[item.rating])
            asked = prose(item.prediction.question)
            if len(unit) > LONG_UNIT:
                asked.append(f" [{unit}]", "dim")
            table.add_row(asked, *figures, error)
        parts.append(table)
    for claim in graded.claims:
        right = claim.chosen == claim.true
        verdict = f"{'true' if claim.true else 'false'}, and you said {'true' if claim.chosen else 'false'}"
        mark = Text("✓ " if right else "✗ ", "green" if right else "bold red")
        parts.append(Text.assemble(mark, f"{claim.letter})  ", prose(claim.text), (f"  {verdict}", "dim")))
    return Group(*parts)


def format_error(error: float) -> str:
    return "exact" if error == 0 else "infinite" if error == float("inf") else format_percent(error, 1)


def explanation_view(card: Card) -> Group:
    """The answer, the notes, the common mistake and the sources."""
    sources = [
        Text.assemble((f"{source.kind}: ", "dim"), source.title, (f"  {source.where}", "dim"))
        for source in card.sources
    ]
    parts = [
        section("Answer", prose(card.answer)),
        section("Notes", prose(card.notes)),
        section("Common mistake", prose(card.mistake)),
        section("Sources", Group(*sources)),
    ]
    if card.chapter:
        parts.append(section("Handbook", Text(card.chapter)))
    return Group(*parts)


def knob_lines(card: Card) -> list[Text]:
    """What can be changed, for `--set` and for the session."""
    return [
        Text.assemble((knob.name, "bold"), f" = {' | '.join(map(str, knob.values))}  ", (knob.meaning, "dim"))
        for knob in card.experiment.knobs
    ]
