"""The exporter: a process beside the training that serves the metrics of a run and pushes them by OTLP. Torch-free.

It reads the run folder and nothing else, so that the training neither waits for a scraper nor fails with the exporter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from meshwright.base.history.run_history import RunHistory
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.supervisor import warn
from meshwright.errors import ConfigError, describe_exception
from meshwright.insight.metrics.collector import RunsCollector, follow
from meshwright.insight.metrics.endpoint import metrics_application
from meshwright.insight.metrics.exporter import REPORTED
from meshwright.insight.watch.http_server import HttpServer

BIND_SECONDS = 2.0
"""Seconds in which a port in use may become free: the exporter of an earlier attempt under torchrun may be ending."""
NICENESS = 10
"""About a tenth of the weight of a process of the training."""
PUSH_SECONDS = 10.0
"""Seconds between two pushes by OTLP."""


def export_run(
    folder: RunFolder,
    host: str,
    port: int | None,
    otlp: str,
    stop: threading.Event,
    on_served: Callable[[str], None] = lambda _address: None,
) -> None:
    """Exports the metrics of a run until `stop` is set: on a port, by OTLP, or both. `on_served` gets the address."""
    collector = RunsCollector([follow(RunHistory(folder))])
    push = make_push(otlp, collector)
    server = start_server(collector, host, port) if port is not None else None
    try:
        if server is not None:
            on_served(server.address)
        while not stop.wait(PUSH_SECONDS):
            push()
            if server is not None and server.failure:
                raise RuntimeError(server.failure)
        push()
    finally:
        if server is not None:
            server.stop()


def make_push(otlp: str, collector: RunsCollector) -> Callable[[], None]:
    """What pushes the metrics to an OpenTelemetry collector; nothing without an address."""
    if not otlp:
        return lambda: None
    from meshwright.insight.metrics.otlp import OtlpPusher

    return OtlpPusher(otlp, collector).push


def start_server(collector: RunsCollector, host: str, port: int) -> HttpServer:
    """Serves the metrics on a port, which may be in use for a moment."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            server = HttpServer(metrics_application(collector), host, port)
            server.start()
            return server
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def yield_to_training() -> None:
    """Lowers the priority of this process, also where the kernel divides time between sessions first. With the lowest
    one, it would starve where the training uses all cores.
    """
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def main() -> None:
    """Runs the exporter that `RunExporter` starts, with its settings as JSON in the first argument."""
    settings = json.loads(sys.argv[1])
    exit_with_parent(settings["parent"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    yield_to_training()
    try:
        export_run(RunFolder(Path(settings["folder"])), settings["host"], settings["port"], settings["otlp"], stop)
    except Exception as error:  # noqa: BLE001 - the training goes on, whatever it is
        warn(f"the metrics are not exported, and the training continues: {describe_exception(error)}")
        raise SystemExit(REPORTED) from None


if __name__ == "__main__":
    main()
