"""`meshwright watch`: shows runs while they train, in the terminal and on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import Json, flag, option, positional
from meshwright.base.terminal.output import emit_json


def watch(
    runs: Annotated[tuple[Path, ...], positional("RUN", "run folders: running, finished or failed")],
    once: Annotated[bool, flag("print what the view shows now, and exit")] = False,
    json: Json = False,
    no_page: Annotated[bool, flag("show the runs in the terminal only, without a page for the browser")] = False,
    port: Annotated[int | None, option("N", "port of the page (default: the first free one from 8321 upwards)")] = None,
    host: Annotated[str, option("HOST", "address of this machine that the page is served on")] = "127.0.0.1",
) -> None:
    """Watch: show progress, communication and recovery posture of runs, and where their time went."""
    import contextlib
    import time

    from meshwright.base.history.run_history import RunHistory
    from meshwright.base.records.run_folder import RunFolder
    from meshwright.insight.watch.page.run_state import describe_run
    from meshwright.insight.watch.terminal_view import watch_in_terminal

    folders = [RunFolder(run) for run in runs]
    histories = [RunHistory(folder) for folder in folders]
    if json:
        states = [{"run": str(history.folder.root), **describe_run(history, time.time())} for history in histories]
        emit_json({"runs": states})
        return
    if once or no_page:
        with contextlib.suppress(KeyboardInterrupt):
            watch_in_terminal(histories, once=once)
        return
    from meshwright.insight.watch.http_server import HttpServer
    from meshwright.insight.watch.page.routes import make_page

    server = HttpServer(make_page(folders), host, port)
    print(f"page: {server.address} (Ctrl-C ends it)", flush=True)
    server.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            watch_in_terminal(histories, once=False)
            server.wait()  # standard output is not a terminal: the page is served until Ctrl-C
    finally:
        server.stop()
