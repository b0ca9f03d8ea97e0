"""Starts a supervisor with the secret of this start of its job, for an engine that keeps one secret for all of them.

`python -P -m meshwright.ops.engines.start_supervisor SECRET_FILE RUN COMMAND...` becomes COMMAND. Supervisors with the
secret of a job that was stopped end at once, so that a host that comes late does not start it again. On Kubernetes a
job that a drained node has stopped shall start again, in new pods that mount the same Secret. The secret of a start is
therefore derived from it and from the newest attempt that was stopped, which all hosts read from the run folder.
Torch-free.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.base.io import read_regular_file
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.ops.engines.blamed_hosts import newest_incidents

MAX_SECRET_BYTES = 4096


def secret_of_start(secret: bytes, folder: RunFolder) -> str:
    """The secret of the start that follows the newest stop of the run."""
    ended = [entry for entry in newest_incidents(folder) if entry.get("outcome") == "stopped" or entry.get("signal")]
    stopped = [entry["attempt"] for entry in ended]
    return hmac.digest(secret, f"start after attempt {max(stopped, default=0)}".encode(), hashlib.sha256).hex()


def main(argv: Sequence[str]) -> None:
    if len(argv) < 3:
        raise SystemExit("expected SECRET_FILE RUN COMMAND...")
    try:
        secret = read_regular_file(Path(argv[0]), MAX_SECRET_BYTES, f"the secret {argv[0]}", "a mounted Secret").strip()
    except ConfigError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    environment = {name: value for name, value in os.environ.items() if name != "MESHWRIGHT_JOB_SECRET_FILE"}
    environment["MESHWRIGHT_JOB_SECRET"] = secret_of_start(secret, RunFolder(Path(argv[1])))
    os.execvpe(argv[2], list(argv[2:]), environment)


if __name__ == "__main__":
    main(sys.argv[1:])
