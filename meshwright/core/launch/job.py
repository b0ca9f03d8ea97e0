"""Jobs: a run is validated and its data opened once, before its ranks are forked or this process becomes a rank."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from meshwright.base.config import RunConfig, fingerprint, identity, placement
from meshwright.base.config.device_defaults import require_bf16, with_device_defaults
from meshwright.base.environment import started_by_torchrun
from meshwright.base.extensions import first_extension
from meshwright.base.models.initial_model import require_tokenized, take_initial_model, with_initial_tokenizer
from meshwright.base.models.registry import validate_family
from meshwright.base.records.attempt_files import write_incident
from meshwright.base.records.events import Event
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.incidents import Incident
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.object_process import make_requests_in_another_process
from meshwright.base.topology.placement import HostPlacement
from meshwright.base.topology.unsupported import validate
from meshwright.base.topology.unused_settings import require_data_settings
from meshwright.base.user_code.entry_points import open_callbacks
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.data.token_files import raise_if_changed
from meshwright.core.launch.host_memory import require_host_memory
from meshwright.core.launch.initial_weights import open_initial_weights
from meshwright.core.launch.ranks import Ranks, cuda_started, raise_if_spawning
from meshwright.core.launch.rendezvous import (
    RendezvousInfo,
    join_process_group,
    leave_process_group,
    torchrun_restart_count,
)
from meshwright.core.launch.shared_weights import share_weights
from meshwright.core.launch.user_code.make_custom_model import open_user_code
from meshwright.core.launch.user_code.update import open_user_update
from meshwright.core.parallel.compile import require_compiler
from meshwright.core.parallel.world import device_type
from meshwright.core.recover.lease import Lease, acquire_lease
from meshwright.core.recover.supervisor import newest_checkpoint_step, record_lost_attempts, warn
from meshwright.core.torch_private import attention_backends, use_attention_backends
from meshwright.core.trainer.callbacks.configured import run_callbacks
from meshwright.core.trainer.identity import code_fingerprint
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import train_rank
from meshwright.core.trainer.records.plan_recorder import PREDICTORS
from meshwright.core.trainer.records.run_summary import RunSummary
from meshwright.errors import ConfigError, MeshwrightError, PeerError, StoppedBySignal, describe_exception
from meshwright.ops.engines.torchrun_elastic import follow_world_size
from meshwright.rl.policy.launch_rollouts import make_rollout_service, open_rollout_code, validate_rollouts
from meshwright.rl.rewards.user_reward import open_reward

MAX_RANKS_PER_HOST = 1024
"""Limit of ranks that are forked on one host."""


def make_job(
    config: RunConfig,
    folder: RunFolder,
    user: UserCode = NO_USER_CODE,
    *,
    accept_code: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> Job:
    """Validates the run and opens its data sources; forked ranks share the memory maps of this process."""
    raise_if_spawning()
    if not started_by_torchrun():
        make_requests_in_another_process()
    if user.model is None:
        config = take_initial_model(config)
    config = follow_world_size(with_initial_tokenizer(config), user.model is not None)
    given, config = config, with_device_defaults(config, device_type(config.launch), user.model is not None)
    require_bf16(given, config)
    layout, batch = validate(config, own_model=user.model is not None)
    if layout.ranks // config.launch.hosts > MAX_RANKS_PER_HOST and not started_by_torchrun():
        raise ConfigError(
            f"{layout.ranks // config.launch.hosts:,} ranks on one host",
            f"expected at most {MAX_RANKS_PER_HOST:,}, or try more hosts (launch.hosts)",
        )
    require_compiler(config)
    if user.source is None:
        require_data_settings(config, folder.has_run)
        if not folder.has_run:
            require_tokenized(config)
    reward = open_reward(config, user)
    # The config may come from another run; the identity of the run folder says which code is that of this run.
    if config.rl.enabled:
        validate_rollouts(config, batch)
        config, custom, sources = open_rollout_code(config, user)
    else:
        config, custom, sources = open_user_code(config, user, same_code=False)
    config, update = open_user_update(config, user, layout)
    if custom is None:
        validate_family(config)
        require_host_memory(config, layout)
    return Job(
        config,
        batch,
        layout,
        sources,
        folder,
        fallback=fallback,
        custom=custom,
        weights=open_initial_weights(config, folder, custom),
        accept_code=accept_code,
        cluster=cluster,
        predictor=first_extension(PREDICTORS),
        callbacks=run_callbacks(config, open_callbacks(user), custom is not None),
        update=update,
        rollouts=make_rollout_service(config, batch, folder, sources, custom, reward) if reward is not None else None,
        given=given,
    )


def start_ranks(job: Job, placement: HostPlacement | None = None) -> Ranks:
    """Forks the ranks of an attempt from this process: all of them, or those that a placement gives this host. The data
    may have changed since an earlier attempt.
    """
    raise_if_changed(job.sources)
    if job.rollouts is not None:
        job.rollouts.ensure_running()
    share_weights(job.custom.modules() if job.custom else [], spawned=cuda_started())
    ranks = placement.local_ranks if placement is not None else range(job.layout.ranks)
    logs = [job.folder.log(job.attempt, rank) for rank in ranks]
    heartbeats = [job.folder.heartbeat(job.attempt, rank) for rank in ranks]
    job = replace(job, placement=placement)
    return Ranks(_train, len(ranks), (job,), job.config.launch, collect_facts(job), logs, heartbeats, placement)


def run_in_this_process(
    job: Job,
    rendezvous: RendezvousInfo,
    make_listener: Callable[[int], Callable[[Event], None]],
    fresh: bool,
    fork: bool,
) -> RunSummary:
    """Trains as one rank in this process, which torchrun started. `make_listener` makes the listener of rank 0 for the
    events of its attempt.
    """
    check_world_size(job, rendezvous.world_size)
    world = join_process_group(rendezvous, job.config.launch, collect_facts(job))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    attention = attention_backends()
    try:
        restarts = int(torchrun_restart_count())
        lease = acquire_lease_or_error(job.folder, fresh, restarts) if world.rank == 0 else None
        attempt = world.broadcast_object(lease.attempt if isinstance(lease, Lease) else str(lease), "attempt")
        if isinstance(attempt, str):
            raise lease if isinstance(lease, MeshwrightError) else PeerError(attempt)
        world = replace(world, heartbeat=Heartbeat(job.folder.heartbeat(attempt, world.rank)))
        listener = make_listener(attempt) if world.rank == 0 else None
        job = job.as_attempt(attempt, restarts, fork)
        job = replace(job, listener=listener, supervised=False)
        with recording_outcome(lease) if isinstance(lease, Lease) else nullcontext():
            return train_rank(job, world)
    finally:  # the process belongs to the user: restore the global state that training changed
        leave_process_group()
        gc.collect()  # the model refers to itself, and to process groups whose threads must end before the process does
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        use_attention_backends(attention)


def check_world_size(job: Job, world_size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raises a ConfigError if the world size does not fit the layout; torchrun decides the number of ranks."""
    ranks = job.layout.ranks
    if world_size == ranks:
        return
    nodes = max(1, world_size // int(environment.get("LOCAL_WORLD_SIZE", world_size)))
    options = [f"torchrun --nproc-per-node {ranks // nodes}"] if ranks % nodes == 0 else [f"{ranks} ranks in total"]
    try:
        layout = job.config.layout.with_ranks(world_size)
        validate(replace(job.config, layout=layout), job.custom is not None)
        options.append(f"--layout.replicate={layout.replicate}")
    except ConfigError as error:
        options.append(f"a layout that fits {world_size} ranks ({error.message})")
    raise ConfigError(
        f"torchrun started {world_size} ranks, and the layout {job.layout} has {ranks}", f"try {' or '.join(options)}"
    )


def acquire_lease_or_error(folder: RunFolder, fresh: bool, restarts: int = 0) -> Lease | MeshwrightError:
    """The lease of the next attempt, or the reason why there is none, which rank 0 tells the others."""
    if restarts and not folder.has_run:
        # Either the ranks failed before there was a lease, or the folder has gone since: torchrun does not tell.
        warn(f"torchrun has restarted the ranks, and {folder.root} has no run: training starts at step 0")
    try:
        lease = acquire_lease(folder, fresh=fresh and not restarts)
        record_lost_attempts(folder, lease.attempt)
        return lease
    except MeshwrightError as error:
        return error


@contextmanager
def recording_outcome(lease: Lease) -> Iterator[None]:
    """Under torchrun, rank 0 holds the lease and records how the attempt ended, as far as rank 0 can see it."""
    folder, attempt = lease.folder, lease.attempt
    try:
        # A run folder that is gone stops all ranks at the same step, as a signal does.
        with lease.keep_alive(on_lost=partial(os.kill, os.getpid(), signal.SIGTERM)):
            yield
        lease.raise_if_lost()
    except MeshwrightError as error:
        lease.raise_if_lost()
        outcome = "stopped" if isinstance(error, StoppedBySignal) else "failed"
        ended = Incident(attempt, outcome, message=describe_exception(error), exit_code=error.exit_code)
        write_incident(folder, ended)
        raise
    except Exception as error:
        lease.raise_if_lost()
        write_incident(folder, Incident(attempt, "failed", message=describe_exception(error), exit_code=1))
        raise
    write_incident(folder, Incident(attempt, "complete", checkpoint_step=newest_checkpoint_step(folder)))


def collect_facts(job: Job) -> dict[str, Any]:
    """What every rank must agree on before the first collective; rendezvous compares it."""
    return {
        "config identity": fingerprint(identity(job.config)),
        "config placement": fingerprint(placement(job.config)),
        "code": code_fingerprint(),
        "code of the model": job.config.custom_model.code,
        "code of the update": job.update.code["fingerprint"] if job.update.code is not None else None,
        "data": [source.fingerprint() for source in job.sources],
        "initial weights": job.weights.digest if job.weights is not None else None,
        "dtype": job.config.precision.compute,
    }


def _train(world: Any, job: Job) -> RunSummary:
    return train_rank(job, world)


def torchrun_rendezvous_info() -> RendezvousInfo | None:
    return RendezvousInfo.from_environment(os.environ)
