"""Starts and ends the exporter of a run from the process that supervises the training. Torch-free."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec

from meshwright.base.config import MetricsConfig
from meshwright.base.environment import start_python
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.running_ranks import RunningRanks, StartAttempt
from meshwright.core.recover.supervisor import warn
from meshwright.errors import ConfigError

REPORTED = 3
"""Exit code of an exporter that has printed why it ended."""
CLOSE_SECONDS = 10.0
"""Seconds that the exporter has to push a last time when the run ends."""
OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


class RunExporter:
    """The exporter of a run, which lasts through all attempts. Whatever happens to it, the training continues.

    Raises:
        ConfigError: the settings need a package that is not installed.
    """

    def __init__(self, settings: MetricsConfig, folder: RunFolder) -> None:
        require_otlp_package(settings)
        self._settings, self._folder = settings, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False

    def start(self) -> None:
        """Starts the exporter, if the settings ask for one and it was not started before."""
        if self._started or not (self._settings.port or self._settings.otlp):
            return
        self._started = True
        settings = {
            "folder": str(self._folder.root),
            "host": self._settings.host,
            "port": self._settings.port or None,
            "otlp": self._settings.otlp,
            "parent": os.getpid(),
        }
        try:
            self._process = start_python(
                "meshwright.insight.metrics.exporter_process",
                json.dumps(settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which ends the exporter after the training
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            warn(f"the metrics are not exported, and the training continues: {error.strerror}")

    def beside(self, start: StartAttempt) -> StartAttempt:
        """Starts the ranks of an attempt as `start` does, and then the exporter."""

        def start_both(attempt: int, restart: int) -> RunningRanks:
            ranks = start(attempt, restart)
            self.start()
            return ranks

        return start_both

    def check(self) -> None:
        """Reports, once, that the exporter has ended before the run."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if code != REPORTED:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                warn(f"the exporter of the metrics ended with {how}; the training continues without it")

    def close(self) -> None:
        """Ends the exporter."""
        self.check()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def require_otlp_package(settings: MetricsConfig) -> None:
    """Raises ConfigError if the settings need a package that is not installed."""
    try:
        found = not settings.otlp or find_spec(OTLP_PACKAGE) is not None
    except ModuleNotFoundError:  # a package that contains it is missing
        found = False
    if not found:
        raise ConfigError(
            f"metrics.otlp needs the package {OTLP_PACKAGE}", "try pip install 'meshwright[opentelemetry]'"
        )
