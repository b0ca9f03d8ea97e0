"""A job as every engine sees it: the command that each host runs, how many hosts run it, and where its files are."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.environment import python_command
from meshwright.base.models.initial_model import load_run_config
from meshwright.core.recover.hosts.hosts_policy import hosts_policy
from meshwright.errors import ConfigError

NO_OPTIONS: Mapping[str, str] = {}
MAX_HOSTS = 65_536
"""Limit of hosts and spares of a job."""
MAX_CPUS = 65_536
"""Limit of CPU cores per host."""


@dataclass(frozen=True)
class EngineJob:
    """One run on several hosts. Every host runs `train_command`, and a run folder that all of them share."""

    config: RunConfig
    run_file: Path
    run: Path
    hosts: int
    spares: int
    ranks_per_host: int
    options: tuple[str, ...]
    """Options of `meshwright train` besides the run file and the run folder."""
    folder: Path
    """The job folder, with the files that start the job."""
    cpus: int | None = None
    """CPU cores per host; None: the engine's choice"""

    @property
    def name(self) -> str:
        """The name of the job for the engine: letters, digits and hyphens, as every engine accepts them."""
        name = re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".rstrip("-")

    @property
    def gpus_per_host(self) -> int:
        """One GPU per rank, unless the run file asks for CPUs."""
        return 0 if self.config.launch.device == "cpu" else self.ranks_per_host

    @property
    def cpus_per_host(self) -> int:
        """The CPU cores that an engine without whole hosts is asked for: the threads and data workers of the ranks."""
        return self.cpus or self.ranks_per_host * (self.config.launch.threads + self.config.data.workers)

    def train_command(self, python: str = sys.executable, run_file: str = "", run: str = "") -> list[str]:
        """The command of a host; `run_file` and `run` are their paths on that host, if these differ from here."""
        arguments = "train", run_file or str(self.run_file), "--run", run or str(self.run)
        command = python_command("meshwright", *arguments, python=python)
        return [*command, *([f"--launch.hosts={self.hosts}"] if self.hosts > 1 else []), *self.options]


def describe_job(
    run_file: str | Path,
    run: str | Path | None = None,
    *,
    hosts: int | None = None,
    spares: int = 0,
    cpus: int | None = None,
    overrides: Sequence[str] = (),
    entry_points: Mapping[str, str] = NO_OPTIONS,
    write: str | Path | None = None,
) -> EngineJob:
    """Validates the run as `meshwright train` does, and that its ranks can be divided among the hosts.

    Args:
        run_file: the run file, or the folder of a run.
        run: the run folder. Default: runs/NAME, where NAME.toml is the run file.
        hosts: the hosts that train. Default: ``launch.hosts`` of the run file.
        spares: hosts beyond them, which wait until one of them fails.
        cpus: CPU cores per host. Default: the engine's choice.
        overrides: settings as ``"--key=value"``, which the command of every host gets.
        entry_points: the options of `meshwright train` that name objects of the user's code.
        write: the job folder. Default: the run folder's path with ``.launch`` appended.
    """
    file = absolute_path(run_file)
    own_model = "model" in entry_points
    config = load_run_config(file, overrides, own_model=own_model)
    hosts = config.launch.hosts if hosts is None else hosts
    if not 1 <= hosts <= MAX_HOSTS or not 0 <= spares <= MAX_HOSTS:
        raise ConfigError(f"--hosts {hosts} --spares {spares}", f"expected at least 1 host, and at most {MAX_HOSTS:,}")
    if cpus is not None and not 1 <= cpus <= MAX_CPUS:
        raise ConfigError(f"--cpus {cpus} is out of range", f"expected 1 to {MAX_CPUS:,} CPU cores per host")
    config = replace(config, launch=replace(config.launch, hosts=hosts))
    policy = hosts_policy(config, own_model)
    folder = file if file.is_dir() else None
    chosen = absolute_path(run) if run is not None else folder or Path.cwd() / "runs" / file.stem
    options = [f"--{name.replace('_', '-')}={text}" for name, text in sorted(entry_points.items())]
    return EngineJob(
        config,
        file,
        chosen,
        hosts,
        spares,
        policy.ranks_per_host,
        (*options, *(override for override in overrides if not override.startswith("--launch.hosts="))),
        absolute_path(write) if write is not None else chosen.with_name(f"{chosen.name}.launch"),
        cpus,
    )


def absolute_path(path: str | Path) -> Path:
    """The absolute path, as the hosts see it on the file system that they share; links are kept."""
    text = os.path.abspath(path)
    if not text.isprintable():
        raise ConfigError(f"the path {text!r} has control characters", "expected a printable path")
    return Path(text)


@dataclass(frozen=True)
class LaunchedJob:
    """What `launch` has written and started."""

    engine: str
    files: tuple[Path, ...]
    """The files, the one that starts the job first."""
    command: tuple[str, ...]
    """The command that starts the job."""
    job: str = ""
    """The name or number that the engine gave to the job; empty: it was not started."""
    note: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "files": [str(file) for file in self.files],
            "command": list(self.command),
            "job": self.job or None,
            "note": self.note or None,
        }

    def text(self) -> str:
        lines = [f"wrote {file}" for file in self.files]
        state = f"started {self.engine} job {self.job}" if self.job else f"start it with: {shlex.join(self.command)}"
        return "\n".join([*lines, state, *([self.note] if self.note else [])])


def write_files(folder: Path, files: Mapping[str, str], private: Sequence[str] = ()) -> tuple[Path, ...]:
    """Writes the files of a job; only the user can read those in `private`. Files of an earlier job are replaced."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path, mode = folder / name, 0o600 if name in private else 0o644
            temporary = path.with_name(f".{name}.{secrets.token_hex(4)}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)
            os.replace(temporary, path)
            paths.append(path)
    except OSError as error:
        raise ConfigError(
            f"the job folder {folder} cannot be written: {error.strerror}", "try --write DIR with a writable folder"
        ) from None
    return tuple(paths)


def checked(value: str, option: str, pattern: str = r"[A-Za-z0-9][A-Za-z0-9._/:@,+=-]*") -> str:
    """A value that becomes part of a file of the engine; raises ConfigError if it has other characters than names."""
    if not re.fullmatch(pattern, value):
        raise ConfigError(f"{option} {value!r} is not a name", f"expected characters that match {pattern}")
    return value
