"""A run's ranks on this host: everything is opened and checked once, here, before any of them is forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.config import RunConfig, fingerprint, identity, placement
from meshwright.data.file_sources import open_sources
from meshwright.data.source import IndexableSource
from meshwright.errors import BusyError, ConfigError, MeshwrightError, PeerError, StoppedBySignal
from meshwright.launch.ranks import Ranks, raise_if_spawning
from meshwright.launch.rendezvous import RendezvousInfo, join_process_group, leave_process_group, torchrun_restart_count
from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.parallel.parallelize import require_spec
from meshwright.recover.incidents import Incident
from meshwright.recover.lease import Lease, acquire_lease, raise_if_held
from meshwright.recover.supervisor import newest_checkpoint_step, record_lost_attempts
from meshwright.telemetry.events import Event
from meshwright.telemetry.heartbeat import Heartbeat
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.unsupported import validate
from meshwright.trainer.identity import code_fingerprint
from meshwright.trainer.loop import Job, RunSummary, train_rank, user_modules
from meshwright.trainer.user_loss import LossFunction


def make_job(
    config: RunConfig,
    folder: RunFolder,
    *,
    model: nn.Module | None = None,
    loss: LossFunction | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    fallback: bool = True,
    cluster: str | None = None,
) -> Job:
    """A checked job, its sources opened: forked ranks share what this process has mapped."""
    raise_if_spawning()
    layout, batch = validate(config, own_model=model is not None)
    if (model is None) != (loss is None):
        raise ConfigError(
            "a model of your own and its loss come together", "allowed: train(config, model=..., loss=...)"
        )
    if model is not None:
        require_spec(parallel_spec, layout, config)
    if source is not None and config.data.mixture:
        raise ConfigError("data.mixture is set and a source of your own is given", "allowed: one of the two")
    if source is None:
        sources = open_sources(config.data, config.model.vocab, config.model.separator)
    else:
        sources = [source if is_source(source) else IndexableSource(source)]
    job = Job(config, batch, layout, sources, folder, fallback=fallback, cluster=cluster)
    return replace(job, model=model, loss=loss, parallel_spec=parallel_spec)


def is_source(thing: Any) -> bool:
    return all(hasattr(thing, name) for name in ("name", "blank", "fingerprint", "__len__", "__getitem__"))


def start_ranks(job: Job) -> Ranks:
    """The job's ranks, forked from this process."""
    for module in user_modules(job):
        module.share_memory()  # rank 0 gives the trained weights back through it
    ranks = range(job.layout.ranks)
    logs = [job.folder.log(job.attempt, rank) for rank in ranks]
    pages = [job.folder.heartbeat(job.attempt, rank) for rank in ranks]
    return Ranks(_train, job.layout.ranks, (job,), job.config.launch, collect_facts(job), logs, pages)


def run_in_this_process(
    job: Job, place: RendezvousInfo, listen: Callable[[int], Callable[[Event], None]], fresh: bool, fork: bool
) -> RunSummary:
    """This process is one rank; torchrun (or the like) started it. `listen` gives rank 0 a listener for its attempt."""
    if place.size != job.layout.ranks:
        raise ConfigError(
            f"the layout {job.layout} has {job.layout.ranks} ranks and {place.size} ranks were started",
            f"allowed: --ranks {place.size}, or {job.layout.ranks} ranks",
        )
    world = join_process_group(place, job.config.launch, collect_facts(job))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        restarts = int(torchrun_restart_count())
        lease = acquire_lease_or_reason(job.folder, fresh and not restarts) if world.rank == 0 else None
        attempt = world.broadcast_object(lease.attempt if isinstance(lease, Lease) else lease, "attempt")
        if isinstance(attempt, str):
            raise BusyError(attempt) if world.rank == 0 else PeerError(attempt)
        world = replace(world, heartbeat=Heartbeat(job.folder.heartbeat(attempt, world.rank)))
        listener = listen(attempt) if world.rank == 0 else None
        job = job.as_attempt(attempt, restarts, fork)
        job = replace(job, listener=listener, watched=False)
        with recording_outcome(lease) if isinstance(lease, Lease) else nullcontext():
            return train_rank(job, world)
    finally:  # this process is the user's: it gets back what training changed
        leave_process_group()
        for number, handler in before.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def acquire_lease_or_reason(folder: RunFolder, fresh: bool) -> Lease | str:
    """The next attempt's lease, or why there is none: the other ranks must hear of it too."""
    try:
        if fresh:
            raise_if_held(folder)
            folder.set_aside()
        lease = acquire_lease(folder)
        record_lost_attempts(folder, lease.attempt)
        return lease
    except BusyError as held:
        return str(held)


@contextmanager
def recording_outcome(lease: Lease) -> Iterator[None]:
    """Where torchrun is the supervisor, rank 0 holds the lease and writes down how the attempt ended, as far as it can
    tell.
    """
    folder, attempt = lease.folder, lease.attempt
    try:
        with lease.keep_alive():
            yield
    except MeshwrightError as error:
        outcome = "stopped" if isinstance(error, StoppedBySignal) else "failed"
        Incident(attempt, outcome, message=str(error), exit_code=error.exit_code).write(folder)
        raise
    except Exception as error:
        Incident(attempt, "failed", message=str(error), exit_code=1).write(folder)
        raise
    Incident(attempt, "complete", checkpoint=newest_checkpoint_step(folder)).write(folder)


def collect_facts(job: Job) -> dict[str, Any]:
    """What every rank must agree on before the first collective."""
    return {
        "config identity": fingerprint(identity(job.config)),
        "config placement": fingerprint(placement(job.config)),
        "code": code_fingerprint(),
        "data": [source.fingerprint() for source in job.sources],
        "dtype": job.config.precision.compute,
    }


def _train(world: Any, job: Job) -> RunSummary:
    return train_rank(job, world)


def torchrun_rendezvous_info() -> RendezvousInfo | None:
    return RendezvousInfo.from_environment(os.environ)
