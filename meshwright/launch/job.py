"""A run's ranks on this host: everything is opened and checked once, here, before any of them is forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.config import RunConfig, fingerprint, identity, placement
from meshwright.config.derive import check
from meshwright.data.files import open_sources
from meshwright.data.source import Indexable
from meshwright.errors import ConfigError
from meshwright.launch.ranks import Ranks, refuse_while_spawning
from meshwright.launch.rendezvous import Place, join, leave
from meshwright.layout import Layout
from meshwright.record.events import Event
from meshwright.record.folder import RunFolder
from meshwright.train.identity import code_fingerprint
from meshwright.train.loop import Job, Summary, train_rank, user_modules
from meshwright.train.objective import Loss


def make_job(
    config: RunConfig,
    folder: RunFolder,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    source: Any = None,
) -> Job:
    """A checked job, its sources opened: forked ranks share what this process has mapped."""
    refuse_while_spawning()
    layout = Layout(replicate=config.layout.replicate)
    batch = check(config, layout.data_degree)
    if (model is None) != (loss is None):
        raise ConfigError(
            "a model of your own and its loss come together", "allowed: train(config, model=..., loss=...)"
        )
    if source is not None and config.data.mixture:
        raise ConfigError("data.mixture is set and a source of your own is given", "allowed: one of the two")
    if source is None:
        sources = open_sources(config.data, config.model.vocab)
    else:
        sources = [source if is_source(source) else Indexable(source)]
    return Job(config, batch, layout, sources, folder, model=model, loss=loss)


def is_source(thing: Any) -> bool:
    return all(hasattr(thing, name) for name in ("name", "blank", "fingerprint", "__len__", "__getitem__"))


def start(job: Job) -> Ranks:
    """The job's ranks, forked from this process."""
    for module in user_modules(job):
        module.share_memory()  # rank 0 gives the trained weights back through it
    logs = [job.folder.log(job.attempt, rank) for rank in range(job.layout.ranks)]
    return Ranks(_train, job.layout.ranks, (job,), job.config.launch, facts_of(job), logs)


def run_here(job: Job, place: Place, listen: Callable[[int], Callable[[Event], None]], fresh: bool) -> Summary:
    """This process is one rank; torchrun (or the like) started it. `listen` gives rank 0 a listener for its attempt."""
    if place.size != job.layout.ranks:
        raise ConfigError(
            f"layout.replicate = {job.layout.replicate} and {place.size} ranks were started",
            f"allowed: layout.replicate = {place.size}, or {job.layout.ranks} ranks",
        )
    world = join(place, job.config.launch, facts_of(job))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        if fresh and world.rank == 0:
            job.folder.set_aside()
        with job.folder.held() if world.rank == 0 else nullcontext():
            attempt = int(world.sum_numbers(job.folder.new_attempt() if world.rank == 0 else 0).wait())
            listener = listen(attempt) if world.rank == 0 else None
            return train_rank(replace(job, attempt=attempt, listener=listener), world)
    finally:  # this process is the user's: it gets back what training changed
        leave()
        for number, handler in before.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def facts_of(job: Job) -> dict[str, Any]:
    """What every rank must agree on before the first collective."""
    return {
        "config identity": fingerprint(identity(job.config)),
        "config placement": fingerprint(placement(job.config)),
        "code": code_fingerprint(),
        "data": [source.fingerprint() for source in job.sources],
        "dtype": job.config.precision.compute,
    }


def _train(world: Any, job: Job) -> Summary:
    return train_rank(job, world)


def torchrun_place() -> Place | None:
    return Place.from_environment(os.environ)
