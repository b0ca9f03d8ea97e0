"""Draws docs/run.svg from the events of a run: python docs/picture.py runs/tiny"""

import io
import sys
from pathlib import Path

from rich.console import Console

from meshwright.config import load_config
from meshwright.observe.terminal import Terminal, live_line
from meshwright.telemetry.events import read_events
from meshwright.telemetry.run_folder import RunFolder

SHOWN = ("counters", "eval", "checkpoint")


def main(folder: RunFolder) -> None:
    events = [e for e in read_events(folder.events(0)) if e["attempt"] == folder.last_attempt()]
    terminal = Terminal(load_config(folder.run_file), folder.root, folder.last_attempt(), io.StringIO())
    terminal.rich = Console(record=True, width=150, file=io.StringIO(), force_terminal=False, highlight=False)
    terminal.say("$ make train", "bold green")
    terminal.config = load_config(folder.run_file, ["--log_every=100000"])  # the live line stands for the plain ones
    middle = [e for e in events if e["kind"] == "step"][: round(0.7 * terminal.steps)]
    for event in events:
        if event["kind"] == "start" or (event["kind"] in SHOWN and event["step"] < middle[-1]["step"]):
            terminal.show(event)
    terminal.rich.print(live_line(middle[-20:], terminal.steps, 150, terminal.saved))
    terminal.rich.save_svg("docs/run.svg", title="meshwright")


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
