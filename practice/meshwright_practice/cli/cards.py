"""`meshwright practice cards`: predicts, runs, sees and explains, with spaced repetition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from meshwright.base.cli.args import Json, flag, option
from meshwright.base.terminal.output import emit_json
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from meshwright_practice.cards.card import Card
    from meshwright_practice.cards.runner import ExperimentRunner
    from meshwright_practice.progress import PracticeProgress

MAX_SECONDS, MAX_GIB = 86_400, 1_048_576
"""The largest limits that can be set."""


def practice_cards(
    list_: Annotated[bool, flag("list all cards by kind, with the state of each")] = False,
    show: Annotated[str | None, option("ID", "print a card without running its experiment")] = None,
    run: Annotated[str | None, option("ID", "run the experiment of a card without a grade")] = None,
    card: Annotated[str | None, option("ID", "review one card, whether it is due or not")] = None,
    set_: Annotated[tuple[str, ...], option("KNOB=VALUE", "settings of the experiment of --run or --card")] = (),
    answer: Annotated[
        tuple[str, ...] | None, option("VALUE", "answer of --card: a number per prediction, letters of true claims")
    ] = None,
    verify: Annotated[
        tuple[str, ...] | None, option("ID", "run the experiments of these cards, or of all, and check every relation")
    ] = None,
    seconds: Annotated[float, option("S", "limit of the wall time of an experiment")] = 20.0,
    memory: Annotated[float, option("GB", "limit of the memory of an experiment, in GiB")] = 3.0,
    json: Json = False,
) -> None:
    """Practice cards: predict what a distributed experiment measures, run it, and see why; with spaced repetition."""
    from meshwright.base.terminal.console import make_console
    from meshwright_practice.cards.registry import all_cards, find_card, parse_knobs
    from meshwright_practice.cards.runner import ExperimentRunner, RunLimits

    modes = {"--list": list_, "--show": show, "--run": run, "--card": card, "--verify": verify}
    given = [name for name, value in modes.items() if value not in (None, False)]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} cannot be combined", "expected one of them")
    if answer is not None and card is None:
        raise ConfigError("--answer has no card to answer", "expected --card ID --answer VALUE")
    if set_ and run is None and card is None:
        raise ConfigError("--set has no experiment to set", "expected --run ID --set KNOB=VALUE")
    for name, value, largest in (("--seconds", seconds, MAX_SECONDS), ("--memory", memory, MAX_GIB)):
        if not 0 < value <= largest:
            raise ConfigError(f"{name} {value:g} is not a limit", f"expected a number above 0, and at most {largest:,}")
    cards, console = all_cards(), make_console()
    if list_:
        print_list(cards, console, json)
    elif show is not None:
        print_card(find_card(cards, show), console, json)
    else:
        with ExperimentRunner(RunLimits(seconds, int(memory * 2**30))) as runner:
            if verify is not None:
                chosen = [find_card(cards, name) for name in verify] if verify else list(cards.values())
                verify_deck(chosen, runner, console, json)
            elif run is not None:
                found = find_card(cards, run)
                run_card(found, parse_knobs(found.experiment, set_), runner, console, json)
            elif card is not None:
                found = find_card(cards, card)
                review_card(found, parse_knobs(found.experiment, set_), answer, runner, console, json)
            else:
                review_due(cards, runner, console, json)


def print_list(cards: Mapping[str, Card], console: Console, json: bool) -> None:
    from rich.text import Text

    from meshwright_practice.cards.registry import KINDS
    from meshwright_practice.cards.schedule import local_clock, read_states

    states, now = read_states(cards, load()), local_clock()
    if json:
        rows = [
            {"card": card.id, "kind": card.kind, "question": card.question, "items": list(card.items)}
            | {"state": states[card.id].describe(now), "reviews": len(states[card.id].reviews)}
            for card in cards.values()
        ]
        emit_json({"cards": rows})
        return
    described = {card_id: state.describe(now) for card_id, state in states.items()}
    id_width, state_width = (max(map(len, texts), default=0) for texts in (described, described.values()))
    for kind in KINDS:
        of_kind = [card for card in cards.values() if card.kind == kind]
        if of_kind:
            console.print(Text(f"{kind} ({len(of_kind)})", "bold"))
        for card in of_kind:
            line = Text.assemble((f"  {card.id:<{id_width}}", "cyan"), f"  {described[card.id]:<{state_width}}  ")
            line.append(" ".join(card.question.split()), "dim")
            line.truncate(max(console.width - 1, id_width + state_width + 6), overflow="ellipsis")
            console.print(line, soft_wrap=True)


def print_card(card: Card, console: Console, json: bool) -> None:
    from dataclasses import asdict

    from rich.text import Text

    from meshwright_practice.cards.card_text import explanation_view, knob_lines, question_view, section

    if json:
        emit_json({"card": asdict(card)})
        return
    console.print(question_view(card, card.experiment.defaults()))
    asked = [f"{prediction.question} [{prediction.unit}]" for prediction in card.predictions]
    for name, lines in (("Predict", list(map(Text, asked))), ("Knobs", knob_lines(card))):
        if lines:
            console.print(section(name, Text("\n").join(lines)))
    console.print(explanation_view(card))


def run_card(
    card: Card, knobs: Mapping[str, int | float | str | bool], runner: ExperimentRunner, console: Console, json: bool
) -> None:
    from meshwright_practice.cards.session import ReviewSession
    from meshwright_practice.cards.verify import find_problems
    from meshwright_practice.progress import progress_file

    run = ReviewSession(runner, progress_file(), console, quiet=json).run_only(card, knobs)
    problems = find_problems(card, run)
    if json:
        emit_json({"card": card.id, "problems": list(problems)} | run.to_json())
    if problems:
        raise SystemExit(1)


def review_card(
    card: Card,
    knobs: Mapping[str, int | float | str | bool],
    answer: Sequence[str] | None,
    runner: ExperimentRunner,
    console: Console,
    json: bool,
) -> None:
    import sys

    from meshwright_practice.cards.schedule import import_fsrs
    from meshwright_practice.cards.session import ReviewSession
    from meshwright_practice.progress import progress_file

    if answer is None and (json or not sys.stdin.isatty()):
        raise ConfigError(f"the card {card.id} asks for an answer, and there is no terminal", "expected --answer VALUE")
    import_fsrs()
    reviewed = ReviewSession(runner, progress_file(), console, quiet=json).review(card, knobs, answer)
    if json:
        emit_json(reviewed.to_json())
    if reviewed.grade is None:
        raise SystemExit(1)
    if reviewed.is_error:
        raise SystemExit(ConfigError.exit_code)


def review_due(cards: Mapping[str, Card], runner: ExperimentRunner, console: Console, json: bool) -> None:
    import sys

    from rich.text import Text

    from meshwright_practice.cards.schedule import format_due, import_fsrs, local_clock, read_states, review_queue
    from meshwright_practice.cards.session import ReviewSession
    from meshwright_practice.progress import progress_file

    now = local_clock()
    queue = review_queue(cards, read_states(cards, load()), now)
    interactive = sys.stdin.isatty() and console.is_terminal and not json
    if json:
        names = {"due": [card.id for card in queue.due], "new": [card.id for card in queue.new]}
        later = queue.next_due.isoformat() if queue.next_due is not None else None
        emit_json(names | {"postponed": queue.postponed, "next_due": later})
        return
    postponed = f", {queue.postponed} more wait for tomorrow" if queue.postponed else ""
    console.print(Text(f"{len(queue.due)} due, {len(queue.new)} new{postponed}", "bold"))
    if not queue.cards:
        later_text = f"; the next card is due {format_due(queue.next_due, now)}" if queue.next_due else ""
        console.print(Text(f"Nothing is left for today{later_text}.", "dim"))
        return
    if not interactive:
        for number, card in enumerate(queue.cards):
            state = "due" if number < len(queue.due) else "new"
            console.print(Text.assemble(f"  {state}  ", (card.id, "cyan"), (f"  {card.kind}", "dim")))
        console.print(
            Text("A review needs a terminal; --card ID --answer VALUE reviews one card without.", "dim"), soft_wrap=True
        )
        return
    import_fsrs()
    ReviewSession(runner, progress_file(), console).review_all(queue.cards)


def verify_deck(cards: Sequence[Card], runner: ExperimentRunner, console: Console, json: bool) -> None:
    import time

    from rich.text import Text

    from meshwright.base.io import format_bytes
    from meshwright_practice.cards.verify import verify_cards

    began, verified = time.monotonic(), []
    for item in verify_cards(cards, runner):
        verified.append(item)
        if json:
            continue
        mark, style = ("✗", "bold red") if item.problems else ("✓", "green")
        memory = format_bytes(item.run.peak_bytes) if item.run.peak_bytes else "-"
        cost = f"{item.run.seconds:6.2f} s  {memory:>9}"
        shared = f"  with {item.shared_with}" if item.shared_with else ""
        console.print(Text.assemble((mark, style), f" {cost}  {item.card.id}", (shared, "dim")), soft_wrap=True)
        for problem in item.problems:
            console.print(Text(f"    {problem}", "bold red"), soft_wrap=True)
    wrong = sum(bool(item.problems) for item in verified)
    experiments = sum(not item.shared_with for item in verified)
    relations = sum(len(item.card.relations) + len(item.card.refuted) for item in verified)
    total = time.monotonic() - began
    if json:
        emit_json({"cards": [item.to_json() for item in verified], "wrong": wrong, "seconds": total})
    else:
        counted = f"{len(verified)} cards, {experiments} experiments, {relations} relations: {wrong} cards are wrong"
        console.print(Text(f"{counted}; {total:.1f} s", "bold"))
    if wrong:
        raise SystemExit(1)


def load() -> PracticeProgress:
    """The progress of the user; a damaged file or entry is set aside, and standard error says so."""
    import sys

    from meshwright_practice.cards.schedule import load_cards
    from meshwright_practice.progress import progress_file

    return load_cards(progress_file(), lambda message: print(f"meshwright: {message}", file=sys.stderr))
