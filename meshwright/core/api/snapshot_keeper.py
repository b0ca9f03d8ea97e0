"""The memory in which a host keeps snapshots: a folder in /dev/shm that exists as long as its supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.core.store.memory.keeper import SnapshotKeeper
from meshwright.errors import ConfigError

PREFIX = "meshwright-snapshots-"
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def snapshot_keeper(config: RunConfig, parent: Path = SHARED_MEMORY) -> Iterator[SnapshotKeeper | None]:
    """The keeper of this host while its supervisor runs; None if the run makes no snapshots."""
    if not config.checkpoint.memory_every or config.checkpoint.mode == "off" or config.launch.hosts == 1:
        yield None
        return
    remove_stale_folders(PREFIX, parent)
    try:
        folder = ScratchFolder(PREFIX, parent)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory_every = {config.checkpoint.memory_every}, and {parent} cannot be written: "
            f"{error.strerror}",
            "try a container with shared memory (--shm-size), or checkpoint.memory_every = 0",
        ) from None
    try:
        yield SnapshotKeeper(folder.path)
    finally:
        folder.remove()
