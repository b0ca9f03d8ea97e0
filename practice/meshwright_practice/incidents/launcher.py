"""The process that runs the job of an incident in the background, within limits of time: `python -P -m ... FOLDER`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import NoReturn

from meshwright.base.io import write_json
from meshwright.errors import MeshwrightError
from meshwright_practice.incidents.catalogue import CLASSES
from meshwright_practice.incidents.incident import read_seal
from meshwright_practice.incidents.job import ENDED_FILE, GRACE_SECONDS, LIMIT_SECONDS, RUN_FOLDER


class JobStopped(BaseException):
    """A signal came between two acts."""


def main(folder: Path) -> int:
    """Performs the acts of the incident, and records how the job ended."""
    limit_time()
    from meshwright_practice.incidents.acts import perform, was_stopped

    incident = read_seal(folder, CLASSES)
    outcome, code, message = "complete", 0, ""
    try:
        for act in incident.arrangement.acts:
            perform(act, folder / RUN_FOLDER)
    except (JobStopped, KeyboardInterrupt):
        outcome, code, message = "stopped", 143, "the job was stopped"
    except MeshwrightError as error:
        outcome, code = ("stopped" if was_stopped(error) else "failed"), error.exit_code
        message = str(error).splitlines()[0]
        print(f"meshwright: {message}", file=sys.stderr, flush=True)
    write_json(
        folder / ENDED_FILE, {"outcome": outcome, "exit_code": code, "message": message[:2000], "time": time.time()}
    )
    return 0


def limit_time() -> None:
    """Ends this process in time whatever it does: first by the signal that a user would send, then at once."""
    alarms = count(1)

    def on_alarm(_number: int, _frame: object) -> None:
        if next(alarms) > 3:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_stop(_number: int, _frame: object) -> NoReturn:
        raise JobStopped

    signal.signal(signal.SIGTERM, on_stop)  # while ranks run, the supervisor has its own handler
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS, GRACE_SECONDS)
    # A thread without the interpreter lock: it ends the process even if native code never returns.
    faulthandler.dump_traceback_later(LIMIT_SECONDS + 6 * GRACE_SECONDS, exit=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
