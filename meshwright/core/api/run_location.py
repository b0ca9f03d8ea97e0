"""Where a run is: its folder, or the local mirror of its URL, and what copies the records of the mirror."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.cli.python_args import given_path
from meshwright.base.config import RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import make_mirror
from meshwright.base.store.object_url import is_url
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.local_ranks import LocalLauncher
from meshwright.core.recover.running_ranks import RunningRanks
from meshwright.core.recover.supervisor import warn
from meshwright.core.store.record_pusher import RecordPusher
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.core.launch.rendezvous import RendezvousInfo


def default_name(config: RunConfig, entry_points: Mapping[str, str], model: Any = None) -> str:
    """The name of a run folder that was not given: the preset, or the class or function of a custom model."""
    if typed := entry_points.get("model"):
        return re.split("[.:]", typed)[-1].lower()
    if model is None:
        return config.preset
    return str(getattr(model, "__name__", type(model).__name__)).strip("<>").lower()


def run_folder(run: str | Path | None, name: str) -> RunFolder:
    """Resolves the run folder once, so that a later change of a link or of the working directory has no effect. For a
    URL it is the local mirror of the run.
    """
    if run is not None and is_url(run):
        return RunFolder(make_mirror(run))
    try:
        return RunFolder((given_path(run, "run") if run is not None else Path("runs") / name).resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of symbolic links, a name with a null character
        raise ConfigError(f"run {run!s} is not a folder: {error}", "expected --run DIR") from None


def open_pusher(folder: RunFolder, fresh: bool, rendezvous: RendezvousInfo | None = None) -> RecordPusher:
    """Fetches the records of a run in an object store, and makes what pushes them. Under torchrun, one rank per host
    does so.
    """
    if folder.url and fresh:
        raise ConfigError(f"--fresh cannot rename {folder.url}, which is in an object store", "try another --run URL")
    if rendezvous is not None and rendezvous.local_rank:
        return RecordPusher(None, warn)
    return RecordPusher(folder.root, warn)


@dataclass(frozen=True)
class PushingLauncher:
    """Starts the ranks of this host in a job on several hosts, and pushes their records."""

    pusher: RecordPusher
    launcher: LocalLauncher

    def start(self, attempt: int, restart: int, placement: HostPlacement | None = None) -> RunningRanks:
        if placement is not None:
            self.pusher.on_host(attempt, placement.local_ranks)
        return self.launcher.start(attempt, restart, placement)


def relative_path(folder: RunFolder) -> Path:
    """Returns the path of a run folder relative to the working directory if it is below it."""
    here = Path.cwd()
    return folder.root.relative_to(here) if folder.root != here and folder.root.is_relative_to(here) else folder.root
