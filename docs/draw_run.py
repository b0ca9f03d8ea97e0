"""Draws docs/run.svg, the terminal during a run, from the events of a run: python docs/draw_run.py runs/tiny"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from meshwright.base.config import load_config
from meshwright.base.history.step_table import RECENT_STEPS
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.terminal.terminal import Terminal, live_line

WIDTH = 160
SHOWN = ("counters", "eval", "checkpoint")


def main(folder: RunFolder) -> None:
    attempt = folder.last_attempt()
    events = [event for event in read_events(folder.events(0)) if event["attempt"] == attempt]
    # The live line replaces the plain lines.
    config = load_config(folder.run_file, ["--log_every=100000"])
    terminal = Terminal(config, folder.root, attempt, io.StringIO())
    terminal.console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=False, highlight=False)
    terminal.print("$ make train", "bold green")
    steps = [event for event in events if event["kind"] == "step"][: round(0.7 * terminal.steps)]
    for event in events:
        if event["kind"] == "start" or (event["kind"] in SHOWN and event["step"] < steps[-1]["step"]):
            terminal.show(event)
    terminal.console.print(live_line(steps[-RECENT_STEPS:], terminal.steps, WIDTH, terminal.checkpoint))
    terminal.console.save_svg("docs/run.svg", title="meshwright")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    main(RunFolder(parser.parse_args().run))
