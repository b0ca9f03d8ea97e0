"""A process that imports torch once, opens the data once, and forks the ranks; its parent never imports torch.

Run as `python -m meshwright.launch.nursery FD`: the job comes as JSON on standard input, the result goes as JSON to FD.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from meshwright.config import from_dict
from meshwright.errors import MeshwrightError
from meshwright.launch.failures import RanksFailed
from meshwright.process import die_with
from meshwright.record.folder import RunFolder


def main(result_file: int, order: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ranks live, a signal simply ends this process
    result: dict[str, Any]
    try:
        result = {"summary": nurse(order)}
    except RanksFailed as failed:
        result = {"failures": [failure.to_json() for failure in failed.failures]}
    except MeshwrightError as error:
        result = {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        result = {"error": f"{error.strerror}: {error.filename or 'the run folder'}", "exit_code": 1}
    with os.fdopen(result_file, "w") as out:
        json.dump(result, out)


def nurse(order: dict[str, Any]) -> dict[str, Any]:
    """Starts the ranks and stays until they have ended."""
    from meshwright.launch.job import make_job, start  # brings torch: seconds in which a signal must find its default

    die_with(order["parent"])
    job = make_job(from_dict(order["config"]), RunFolder(Path(order["folder"])))
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _frame: asked.append(got))
    ranks = start(dataclasses.replace(job, attempt=order["attempt"]))
    while not ranks.poll(0.2):
        if asked:
            ranks.signal(asked.pop())
    return dataclasses.asdict(ranks.results()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
