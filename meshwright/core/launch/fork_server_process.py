"""The fork server: a process that imports torch once, opens the data once, and forks the ranks of every attempt.

It runs as `python -P -m meshwright.core.launch.fork_server_process RESULTS JOB`, with two file descriptors. The job is
read from JOB as JSON, and each attempt arrives as one line of JSON on standard input. The result of each attempt is
written to RESULTS as one line of JSON. The parent process never imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.config import config_from_dict
from meshwright.base.environment import stop_signals
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.recover.hosts.rank_lock import hold_lock
from meshwright.errors import MeshwrightError, limit_error

if TYPE_CHECKING:
    from meshwright.core.launch.ranks import Ranks


class ForkServerProcess:
    """Builds the job at the first attempt and keeps it, with its data open, for the following ones."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.job: Any = None
        self.signals: list[int] = []

    def run_attempt(self, options: dict[str, Any]) -> dict[str, Any]:
        """Starts the ranks, waits until they have ended, and returns the summary of the run."""
        ranks = self.start_ranks(options)
        while not ranks.poll(0.2):
            if self.signals:
                ranks.signal(self.signals.pop())
        return self.summarize(ranks.results()[0])

    def summarize(self, result: Any) -> dict[str, Any]:
        """The result of the first rank of this host, as JSON."""
        return dataclasses.asdict(result)

    def start_ranks(self, options: dict[str, Any]) -> Ranks:
        """Starts the ranks of an attempt."""
        # Importing torch takes seconds, during which a signal has its default effect.
        from meshwright.base.user_code.entry_points import load_user_code
        from meshwright.core.launch.job import make_job, start_ranks
        from meshwright.core.launch.user_code.make_custom_model import torch_seed

        values = options.pop("placement")
        placement = HostPlacement.from_json(values) if values is not None else None
        if self.job is None or (placement is not None and placement.world_size != self.job.layout.ranks):
            folder = RunFolder(Path(self.request["folder"]))
            config = config_from_dict(self.request["config"])
            if placement is not None:  # fewer hosts than the config has, or all of them again
                layout = config.layout.with_ranks(placement.world_size)
                launch = replace(config.launch, hosts=len(placement.hosts))
                config = replace(config, layout=layout, launch=launch)
            with torch_seed(config.seed):
                user = load_user_code(self.request["entry_points"])
            self.job = make_job(config, folder, user, **self.request["options"])
        self.collect_signals()
        return start_ranks(self.job.as_attempt(**options), placement)

    def collect_signals(self) -> None:
        """From now on a signal is passed to the ranks."""
        for number in stop_signals():
            signal.signal(number, lambda received, _frame: self.signals.append(received))


def main(result_file: int, job_file: int, process: type[ForkServerProcess] = ForkServerProcess) -> None:
    if signal.SIGINT in stop_signals():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ranks exist, a signal simply ends this process
    with os.fdopen(job_file) as file:
        server = process(json.load(file))
    exit_with_parent(server.request["parent"])
    if lock := server.request.get("lock"):  # the ranks inherit it
        hold_lock(Path(lock))
    with os.fdopen(result_file, "w") as out:
        for line in sys.stdin:
            out.write(json.dumps(attempt_result(server, json.loads(line))) + "\n")
            out.flush()


def attempt_result(server: ForkServerProcess, options: dict[str, Any]) -> dict[str, Any]:
    """The summary of an attempt, its failures, or the error that prevented it, as JSON."""
    try:
        return {"summary": server.run_attempt(options)}
    except RanksFailed as failed:
        return {"failures": [failure.to_json() for failure in failed.failures]}
    except MeshwrightError as error:
        return {"error": Failure.from_exception(-1, error).to_json()}
    except OSError as error:
        message = f"{error.strerror}: {error.filename or 'the run folder'}"
        reported = limit_error(error) or MeshwrightError(message)
        return {"error": Failure.from_exception(-1, reported).to_json()}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
