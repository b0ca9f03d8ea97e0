"""Elastic jobs under torchrun: the layout follows the number of ranks, which may change at a restart. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.config.constraints import nearest_values
from meshwright.base.environment import started_by_torchrun
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError, PeerError

MAX_TRIED_SIZES = 1024
"""World sizes that an error message tries."""
POLL_SECONDS = 0.05


def follow_world_size(
    config: RunConfig, own_model: bool = False, environment: Mapping[str, str] = os.environ
) -> RunConfig:
    """With `launch.elastic`, the config on the number of ranks that torchrun has started: `layout.replicate` changes.

    Raises:
        ConfigError: the layout or the batch does not divide; the error names the numbers of ranks that do.
    """
    if not config.launch.elastic or not started_by_torchrun(environment):
        return config
    world_size = int(environment["WORLD_SIZE"])
    try:
        return on_ranks(config, world_size, own_model)
    except ConfigError as error:
        limit = min(max(2 * world_size, 16), MAX_TRIED_SIZES)
        sizes = [size for size in range(1, limit + 1) if fits(config, size, own_model)]
        raise ConfigError(
            f"launch.elastic: the run cannot continue on the {world_size} ranks that torchrun started: {error.message}",
            f"expected {nearest_values(sizes, world_size)} ranks" if sizes else error.hint,
        ) from None


def on_ranks(config: RunConfig, ranks: int, own_model: bool) -> RunConfig:
    config = replace(config, layout=config.layout.with_ranks(ranks))
    validate(config, own_model)
    return config


def fits(config: RunConfig, ranks: int, own_model: bool) -> bool:
    try:
        on_ranks(config, ranks, own_model)
    except ConfigError:
        return False
    return True


def agree_on_generation(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """A name for this set of ranks that no earlier one had; all ranks return the same.

    torchrun does not say which round of its rendezvous this is: an agent that joins later counts restarts from zero,
    and the store may have keys of earlier ranks. Rank 0 makes a new name, and the others answer it with a number of
    their own. Rank 0 then publishes the numbers, so that a rank which read an old name finds its number missing.
    """
    deadline = time.monotonic() + timeout
    own = secrets.token_hex(8)
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("generation", name)
        keys = [f"generation/{name}/{other}" for other in range(1, world_size)]
        wait_until(lambda: store.check(keys) if keys else True, deadline, lambda: missing(store, keys))
        store.set(f"generation/{name}/all", json.dumps([store.get(key).decode() for key in keys]))
        return name
    while True:
        wait_until(lambda: store.check(["generation"]), deadline, lambda: "rank 0 has not joined")
        name = store.get("generation").decode()
        store.set(f"generation/{name}/{rank}", own)
        while store.get("generation").decode() == name:
            if store.check([f"generation/{name}/all"]) and own in json.loads(store.get(f"generation/{name}/all")):
                return str(name)
            wait_until(lambda: True, deadline, lambda: "rank 0 has not joined")
            time.sleep(POLL_SECONDS)


def missing(store: Any, keys: list[str]) -> str:
    absent = [key.rpartition("/")[2] for key in keys if not store.check([key])]
    return f"rank(s) {', '.join(absent[:16])} have not joined"


def wait_until(condition: Any, deadline: float, describe: Any) -> None:
    """Polls; raises PeerError after the deadline."""
    while True:
        if time.monotonic() > deadline:
            raise PeerError(f"{describe()} within launch.rendezvous_timeout", "try a larger launch.rendezvous_timeout")
        if condition():
            return
        time.sleep(POLL_SECONDS)
