"""A review on the terminal: predict, run, see, explain. Every completed review is saved at once. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from meshwright.errors import ConfigError
from meshwright_practice.cards.answers import parse_choice, parse_number
from meshwright_practice.cards.card import Card, Knobs
from meshwright_practice.cards.card_text import (
    RATING_STYLES,
    explanation_view,
    grade_view,
    knob_lines,
    question_view,
    run_view,
    section,
)
from meshwright_practice.cards.grading import Grade
from meshwright_practice.cards.registry import parse_knobs
from meshwright_practice.cards.reviews import Answers, ReviewedCard, complete_review, take_answers
from meshwright_practice.cards.runner import ExperimentRun, ExperimentRunner
from meshwright_practice.cards.schedule import CardState, Clock, format_due, local_clock

Ask = Callable[[str], str]
T = TypeVar("T")


def ask_answers(card: Card, ask: Ask, console: Console) -> Answers:
    """Asks for each prediction, and for the choice of claims; an answer that cannot be read is asked for again."""
    predicted = []
    for prediction in card.predictions:
        unit = f" [{prediction.unit}]" if prediction.unit else ""
        parse = partial(parse_number, unit=prediction.unit)
        predicted.append(ask_until_valid(f"{prediction.question}{unit} > ", parse, ask, console))
    chosen: set[str] = set()
    if card.claims:
        prompt = "Which claims are true? (letters, or none) > "
        chosen = ask_until_valid(prompt, lambda text: parse_choice(card, [text]), ask, console)
    return Answers(tuple(predicted), frozenset(chosen))


def ask_until_valid(prompt: str, parse: Callable[[str], T], ask: Ask, console: Console) -> T:
    while True:
        try:
            return parse(ask(prompt))
        except ConfigError as error:
            console.print(Text(str(error), "yellow"))


class ReviewSession:
    """Reviews cards one after the other.

    Args:
        runner: runs the experiments; it starts with the first question.
        path: the progress file.
        console: where everything is shown.
        ask: shows a prompt and returns the line that the reader types; by default on the console.
        clock: the present time, with a time zone.
        quiet: whether nothing is shown, as for JSON.
    """

    def __init__(
        self,
        runner: ExperimentRunner,
        path: Path,
        console: Console,
        ask: Ask | None = None,
        clock: Clock = local_clock,
        quiet: bool = False,
    ) -> None:
        self.runner, self.path, self.console = runner, path, console
        self.ask: Ask = ask or (lambda prompt: console.input(Text(prompt)))
        self.clock, self.quiet = clock, quiet

    def show(self, *parts: Any) -> None:
        if not self.quiet:
            self.console.print(*parts, sep="\n")

    def review(self, card: Card, knobs: Knobs, texts: Sequence[str] | None = None, position: str = "") -> ReviewedCard:
        """One card: question, answers (of the reader, or `texts`), run, grade, record, explanation."""
        given = take_answers(card, texts) if texts is not None else None
        self.runner.start()  # torch is imported while the reader thinks
        self.show(question_view(card, knobs, position), "")
        answers = given or ask_answers(card, self.ask, self.console)
        run = self.run(card, knobs)

        def report(message: str) -> None:
            self.show(Text(message, "yellow"))

        reviewed = complete_review(card, answers, run, self.path, self.clock(), report)
        if reviewed.grade is None:
            self.show("", run_view(card, run, self.console), Text("The review is not recorded.", "yellow"))
            return reviewed
        self.show("", grade_view(reviewed.grade), "", run_view(card, run, self.console), explanation_view(card))
        if reviewed.state is None:
            self.show("", Text(f"not recorded: {reviewed.reason}", "bold red" if reviewed.is_error else "yellow"))
        else:
            self.show(section("Next review", self.next_review(reviewed.grade, reviewed.state)))
        return reviewed

    def next_review(self, graded: Grade, state: CardState) -> Text:
        assert state.due is not None
        name = graded.rating.name.capitalize()
        due = format_due(state.due, self.clock())
        return Text.assemble((name, RATING_STYLES[graded.rating]), f": the card is due {due}")

    def run(self, card: Card, knobs: Knobs) -> ExperimentRun:
        """Runs the experiment of a card, with a spinner if a person looks on."""
        if self.quiet or not self.console.is_terminal:
            return self.runner.run(card.experiment, knobs)
        with self.console.status("running the experiment") as status:

            def progress(seconds: float, used: int) -> None:
                status.update(f"running the experiment: {seconds:.0f} s, {used / 2**20:,.0f} MiB")

            return self.runner.run(card.experiment, knobs, progress)

    def run_only(self, card: Card, knobs: Knobs) -> ExperimentRun:
        """Runs an experiment without a grade and shows what it has measured."""
        run = self.run(card, knobs)
        self.show(question_view(card, knobs), "", run_view(card, run, self.console))
        return run

    def play(self, card: Card) -> bool:
        """Lets the reader run the experiment again with other knobs; False if the session should end."""
        while True:
            again = "NAME=VALUE runs again with that setting, " if card.experiment.knobs else ""
            for line in knob_lines(card) if card.experiment.knobs else ():
                self.show(line)
            text = self.ask(f"Enter goes on, {again}q ends > ").strip()
            if not text or text.lower() in ("q", "quit", "exit"):
                return not text
            try:
                knobs = parse_knobs(card.experiment, text.split())
            except ConfigError as error:
                self.show(Text(str(error), "yellow"))
                continue
            self.show("", run_view(card, self.run(card, knobs), self.console), "")

    def review_all(self, cards: Sequence[Card]) -> list[ReviewedCard]:
        """Reviews a queue until it is empty or the reader ends it; Ctrl-C and Ctrl-D end it too."""
        reviewed: list[ReviewedCard] = []
        try:
            for number, card in enumerate(cards, 1):
                position = f"{number} of {len(cards)} · "
                reviewed.append(self.review(card, card.experiment.defaults(), position=position))
                self.show("")
                if not self.play(card):
                    break
        except (KeyboardInterrupt, EOFError):
            self.show("")
        recorded = [item for item in reviewed if item.state is not None]
        self.show(Text(f"{len(recorded)} review{'' if len(recorded) == 1 else 's'} saved in {self.path}.", "dim"))
        return reviewed
