"""What all verbs share as Python functions: validated configs and paths, and errors in Python's words."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.base.config import RunConfig, config_from_dict, config_to_dict
from meshwright.base.records.failures import RanksFailed
from meshwright.base.store.object_url import is_url
from meshwright.errors import ConfigError, MeshwrightError, with_python_hint


def validated(config: RunConfig | None, ranks: int | None = None) -> RunConfig:
    """Checks a config that was built in Python as if it had been read from a file."""
    config = config_from_dict(config_to_dict(config or RunConfig()))
    return config if ranks is None else dataclasses.replace(config, layout=config.layout.with_ranks(ranks))


@contextmanager
def errors_for_python() -> Iterator[None]:
    """Raises failures of ranks as the exception class that the rank raised, and Ctrl-C as KeyboardInterrupt."""
    try:
        yield
    except MeshwrightError as raised:
        error = raised.cause() if isinstance(raised, RanksFailed) else raised
        if error.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(error)) from error
        raise with_python_hint(error) from None


def given_run(run: str | Path, name: str) -> Path:
    """Returns the folder of a run that is read: a path, or the mirror of a URL with the records that its store has."""
    from meshwright.base.store.mirror import resolve_run  # imports numpy, which a plan does not need

    return resolve_run(run if is_url(run) else given_path(run, name))


def given_path(path: str | Path, name: str) -> Path:
    """Returns a path argument; empty text would be the current folder."""
    if not str(path).strip():
        raise ConfigError(f"{name} is an empty path", f"expected {name}=PATH")
    return Path(path)
