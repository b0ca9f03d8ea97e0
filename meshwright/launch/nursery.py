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
from meshwright.launch.job import make_job, start
from meshwright.launch.ranks import die_with
from meshwright.record.folder import RunFolder


def main(result_file: int, order: dict[str, Any]) -> None:
    die_with(order["parent"])
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _frame: asked.append(got))
    result: dict[str, Any]
    try:
        job = make_job(from_dict(order["config"]), RunFolder(Path(order["folder"])))
        ranks = start(dataclasses.replace(job, attempt=order["attempt"]))
        while not ranks.poll(0.2):
            while asked:
                ranks.signal(asked.pop(0))
        result = {"summary": dataclasses.asdict(ranks.results()[0])}
    except RanksFailed as failed:
        result = {"failures": [failure.to_json() for failure in failed.failures]}
    except MeshwrightError as error:
        result = {"error": str(error), "exit_code": error.exit_code}
    with os.fdopen(result_file, "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
