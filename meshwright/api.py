"""The verbs as functions: what the command line does, for a script, torchrun, or a notebook cell."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import RunConfig, config_from_dict, config_to_dict
from meshwright.errors import ConfigError
from meshwright.launch.fork_server import ForkServer
from meshwright.observe.terminal import EventDisplay, Terminal
from meshwright.recover.supervisor import RunningRanks, supervise
from meshwright.telemetry.events import EventFollower
from meshwright.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from meshwright.parallel.parallel_spec import ParallelSpec
    from meshwright.simulator.result import Simulation


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
    parallel_spec: ParallelSpec | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
    screen: Callable[[int], EventDisplay] | None = None,
    quiet: bool = False,
) -> Result:
    """Trains, from wherever the run folder's newest checkpoint stands, and returns when it is done.

    `model`, `loss` and `source` may be your own (a loss returns the sum over what counts, see
    `meshwright.trainer.user_loss`); the weights of `model` are then the trained ones. `parallel_spec` names its blocks
    and how they are cut, where the config shards, cuts, recomputes or compiles it. Ranks are forked from this
    process; under torchrun this process is one of them, and what watches the ranks is torchrun's.
    `fresh` sets an earlier run aside, `fork` goes on from it with other settings, as a new timeline; without `fallback`
    a damaged checkpoint ends the run. `cluster` names the machine that seconds are predicted for (default: this one,
    where it was measured). `screen` shows the events of an attempt (default: the terminal); `quiet` shows
    nothing.
    """
    from meshwright.launch.job import make_job, run_in_this_process, start_ranks, torchrun_rendezvous_info

    config = config_from_dict(config_to_dict(config or RunConfig()))  # checked as if it came from a file
    folder = run_folder(run, config)
    screen = (lambda _attempt: Quiet()) if quiet else screen
    job = make_job(
        config,
        folder,
        model=model,
        loss=loss,
        source=source,
        parallel_spec=parallel_spec,
        fallback=fallback,
        cluster=cluster,
    )
    place = torchrun_rendezvous_info()
    if place is not None:
        show = screen or partial(Terminal, config, shown(folder))
        summary = run_in_this_process(job, place, lambda attempt: show(attempt).show, fresh, fork)
        return Result(folder.root, **dataclasses.asdict(summary))

    def begin(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork))

    return result_of(folder, supervise(folder, config.launch, begin, viewing(config, folder, screen), fresh=fresh))


def train_from_cold(
    config: RunConfig,
    run: Path | None,
    screen: Callable[[int], EventDisplay] | None,
    *,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> Result:
    """The same from a process that has not imported torch and need not."""
    folder = run_folder(run, config)
    fork_server = ForkServer(config, folder, fork, fallback, cluster)
    try:
        view = viewing(config, folder, screen)
        return result_of(folder, supervise(folder, config.launch, fork_server.start, view, fresh=fresh))
    finally:
        fork_server.close()


def simulate(config: RunConfig | None = None, *, ranks: int | None = None, rank: Sequence[int] = ()) -> Simulation:
    """What a step would send and hold on so many ranks, in this process and without any of them: the real model,
    parallelism and step on tensors without content. `rank` chooses the ranks to look at (default: the first, and of a
    pipeline also the first of its last). No run folder is touched.
    """
    from meshwright.simulator.simulate import simulate as simulate_config

    config = config_from_dict(config_to_dict(config or RunConfig()))
    if ranks is not None:
        config = dataclasses.replace(config, layout=config.layout.with_ranks(ranks))
    return simulate_config(config, rank)


def run_folder(run: str | Path | None, config: RunConfig) -> RunFolder:
    """Resolved once: neither a link nor a change of the working folder may lead elsewhere later."""
    if run is not None and not str(run):
        raise ConfigError("--run is empty", "allowed: --run DIR")
    return RunFolder((Path(run) if run is not None else Path("runs") / config.preset).resolve())


def shown(folder: RunFolder) -> Path:
    """As a person would write it from here."""
    here = Path.cwd()
    return folder.root.relative_to(here) if folder.root != here and folder.root.is_relative_to(here) else folder.root


def result_of(folder: RunFolder, summary: Any) -> Result:
    return Result(folder.root, **(summary if isinstance(summary, dict) else dataclasses.asdict(summary)))


def viewing(
    config: RunConfig, folder: RunFolder, screen: Callable[[int], EventDisplay] | None
) -> Callable[[int], Spectator]:
    show = screen or partial(Terminal, config, shown(folder))
    return lambda attempt: Spectator(show(attempt), EventFollower(folder.events(0), only_new=True))


class Spectator:
    """Shows rank 0's events as they come."""

    def __init__(self, screen: EventDisplay, events: EventFollower) -> None:
        self.screen, self.events = screen, events

    def tick(self) -> None:
        for event in self.events.new_events():
            self.show(event)

    def show(self, event: dict[str, Any]) -> None:
        try:
            self.screen.show(event)
        except (OSError, SystemExit):  # whoever was looking has left (rich exits on that); the run goes on
            self.screen = Quiet()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        self.screen.close()


class Quiet:
    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
