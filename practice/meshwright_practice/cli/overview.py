"""`meshwright practice`: what is due and what was done, and the page."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from meshwright.base.cli.args import Json, flag, option
from meshwright.base.terminal.output import emit_json
from meshwright.errors import ConfigError

PLACES = {
    "meshwright practice cards": "review the cards that are due",
    "meshwright practice lab": "write a part of distributed training yourself",
    "meshwright practice incident": "find the fault of a live job",
    "meshwright practice interview": "the timed exercise and the scenario drills",
    "meshwright practice --page": "the same in a browser",
}


def practice(
    page: Annotated[bool, flag("serve the page on localhost until Ctrl-C")] = False,
    port: Annotated[int | None, option("N", "port of the page (default: the first free one from 8341 upwards)")] = None,
    json: Json = False,
) -> None:
    """Practice: show what is due and what was done, or serve cards, progress and handbook as a page."""
    if port is not None and not page:
        raise ConfigError("--port has no page to serve", "expected --page --port N")
    if page:
        serve(port)
        return
    overview = describe_overview()
    if json:
        emit_json(overview)
    else:
        show_overview(overview)


def serve(port: int | None) -> None:
    import contextlib

    from meshwright_practice.cards.schedule import import_fsrs
    from meshwright_practice.page.routes import serve_page

    import_fsrs()
    server, stop = serve_page(port=port)
    print(f"page: {server.address} (Ctrl-C ends it)", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    finally:
        stop()
    if server.failure:
        raise ConfigError(f"the page ended: {server.failure}", "try another --port")


def describe_overview() -> dict[str, Any]:
    from meshwright_practice.cards.registry import all_cards
    from meshwright_practice.cards.schedule import load_cards, local_clock, read_states, review_queue
    from meshwright_practice.page.descriptions import describe_progress, describe_queue
    from meshwright_practice.progress import progress_file

    progress = load_cards(progress_file(), lambda message: print(f"meshwright: {message}", file=sys.stderr))
    cards, now = all_cards(), local_clock()
    states = read_states(cards, progress)
    queue = describe_queue(review_queue(cards, states, now), states, now)
    queue["cards"] = [card["card"] for card in queue["cards"]]
    return {"cards": queue, **describe_progress(progress), "file": str(progress_file())}


def show_overview(overview: dict[str, Any]) -> None:
    from rich.text import Text

    from meshwright.base.io import printable
    from meshwright.base.terminal.console import make_console

    console, queue = make_console(), overview["cards"]
    waiting = f", {queue['postponed']} more wait for tomorrow" if queue["postponed"] else ""
    later = f"; the next card is due {queue['next_due']}" if queue["next_due"] and not queue["cards"] else ""
    lines = {
        "cards": f"{queue['due']} due, {queue['new']} new{waiting}{later}; {queue['begun']} of {queue['total']} begun",
        "labs": summarize(overview["labs"]),
        "incidents": summarize(overview["incidents"]),
        "interviews": summarize(overview["interviews"]),
    }
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<12}", "bold"), printable(text)), soft_wrap=True)
    console.print()
    from meshwright.base.cli.verbs import verbs

    for command, text in PLACES.items():
        if command.removeprefix("meshwright ").partition(" --")[0] not in verbs():
            continue
        console.print(Text.assemble((f"{command:<31}", "cyan"), (text, "dim")), soft_wrap=True)


def summarize(section: dict[str, Any]) -> str:
    """How many entries of a section were begun, and how many of them are done."""
    return f"{section['done']} done of {len(section['entries'])} begun" if section["entries"] else "none begun"
