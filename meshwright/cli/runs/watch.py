"""`meshwright watch`: shows runs while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.cli.args import Json, flag, positional
from meshwright.cli.output import emit_json


def watch(
    runs: Annotated[tuple[Path, ...], positional("RUN", "run folders: running, finished or failed")],
    once: Annotated[bool, flag("print what the view shows now, and exit")] = False,
    json: Json = False,
) -> None:
    """Watch: show progress, communication and recovery posture of runs, and where their time went."""
    import contextlib
    import time

    from meshwright.history.run_history import RunHistory
    from meshwright.observe.watch.run_state import describe_run
    from meshwright.observe.watch.terminal_view import watch_in_terminal
    from meshwright.telemetry.run_folder import RunFolder

    histories = [RunHistory(RunFolder(run)) for run in runs]
    if json:
        states = [{"run": str(history.folder.root), **describe_run(history, time.time())} for history in histories]
        emit_json({"runs": states})
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch_in_terminal(histories, once=once)
