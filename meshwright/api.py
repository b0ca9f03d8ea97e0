"""The verbs as functions: what the command line does, for a script, torchrun, or a notebook cell."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import RunConfig, from_dict, to_dict
from meshwright.launch.host import Nursery, Running, attend
from meshwright.observe.console import Screen, Terminal
from meshwright.record.events import Follower
from meshwright.record.folder import RunFolder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Result:
    """How a run ended, and where its records are."""

    folder: Path
    steps: int
    loss: float | None
    skipped: int
    parameters_digest: str
    evaluations: list[tuple[int, float]]


def train(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    source: Any = None,
    run: str | Path | None = None,
    fresh: bool = False,
    screen: Callable[[int], Screen] | None = None,
    quiet: bool = False,
) -> Result:
    """Trains, and returns when it is done.

    `model`, `loss` and `source` may be your own (a loss returns the sum over what counts, see
    `meshwright.train.objective`); the weights of `model` are then the trained ones. Ranks are forked from this
    process; under torchrun this process is one of them, and what watches the ranks is torchrun's.
    `screen` shows the events of an attempt (default: the terminal); `quiet` shows nothing.
    """
    from meshwright.launch.job import make_job, run_here, start, torchrun_place

    config = from_dict(to_dict(config or RunConfig()))  # checked as if it came from a file
    folder = RunFolder(Path(run) if run is not None else Path("runs") / config.preset)
    screen = (lambda _attempt: Quiet()) if quiet else screen
    job = make_job(config, folder, model=model, loss=loss, source=source)
    place = torchrun_place()
    if place is not None:
        show = screen or partial(Terminal, config, folder.root)
        summary = run_here(job, place, lambda attempt: show(attempt).show, fresh)
        return Result(folder.root, **dataclasses.asdict(summary))
    return supervise(
        config, folder, lambda attempt: start(dataclasses.replace(job, attempt=attempt)), fresh=fresh, screen=screen
    )


def train_from_cold(config: RunConfig, run: Path | None, fresh: bool, screen: Callable[[int], Screen] | None) -> Result:
    """The same from a process that has not imported torch and need not."""
    folder = RunFolder(run if run is not None else Path("runs") / config.preset)
    return supervise(config, folder, lambda attempt: Nursery(config, folder, attempt), fresh=fresh, screen=screen)


def supervise(
    config: RunConfig,
    folder: RunFolder,
    begin: Callable[[int], Running],
    *,
    fresh: bool,
    screen: Callable[[int], Screen] | None,
) -> Result:
    """Holds the run folder, begins an attempt, and shows it until it ends."""
    if fresh:
        folder.set_aside()
    with folder.held():
        attempt = folder.new_attempt()
        shown: Screen = screen(attempt) if screen else Terminal(config, folder.root, attempt)
        events = Follower(folder.events(0), only_new=True)

        def tick() -> None:
            nonlocal shown
            for event in events.new():
                try:
                    shown.show(event)
                except (OSError, SystemExit):  # whoever was looking has left (rich exits on that); the run goes on
                    shown = Quiet()
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        try:
            summary = attend(begin(attempt), tick)[0]
        finally:
            shown.close()
    values = summary if isinstance(summary, dict) else dataclasses.asdict(summary)
    return Result(folder.root, **values)


class Quiet:
    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
