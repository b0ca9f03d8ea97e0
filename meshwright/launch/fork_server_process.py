"""A process that imports torch once, opens the data once, and forks ranks as often as it is asked; its parent never
imports torch.

Run as `python -m meshwright.launch.fork_server_process FD`: the job comes as a line of JSON on standard input, then a
line for every attempt; each attempt's result goes as a line of JSON to FD.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from meshwright.config import config_from_dict
from meshwright.errors import MeshwrightError
from meshwright.parent_death import exit_with_parent
from meshwright.recover.failures import RanksFailed
from meshwright.telemetry.run_folder import RunFolder


class ForkServerProcess:
    """Makes the job at the first attempt and keeps it, its data open, for the next."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.job: Any = None
        self.signals: list[int] = []

    def attempt(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Starts the ranks and stays until they have ended."""
        from meshwright.launch.job import (
            make_job,
            start_ranks,
        )  # brings torch: seconds in which a signal finds its default

        if self.job is None:
            folder = RunFolder(Path(self.order["folder"]))
            given = {key: self.order[key] for key in ("fallback", "cluster")}
            self.job = make_job(config_from_dict(self.order["config"]), folder, **given)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _frame: self.signals.append(got))
        ranks = start_ranks(self.job.as_attempt(**asked))
        while not ranks.poll(0.2):
            if self.signals:
                ranks.signal(self.signals.pop())
        return dataclasses.asdict(ranks.results()[0])


def main(result_file: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ranks live, a signal simply ends this process
    nurse = ForkServerProcess(json.loads(sys.stdin.readline()))
    exit_with_parent(nurse.order["parent"])
    with os.fdopen(result_file, "w") as out:
        for line in sys.stdin:
            out.write(json.dumps(outcome(nurse, json.loads(line))) + "\n")
            out.flush()


def outcome(nurse: ForkServerProcess, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"summary": nurse.attempt(asked)}
    except RanksFailed as failed:
        return {"failures": [failure.to_json() for failure in failed.failures]}
    except MeshwrightError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        return {"error": f"{error.strerror}: {error.filename or 'the run folder'}", "exit_code": 1}


if __name__ == "__main__":
    main(int(sys.argv[1]))
