"""`meshwright metrics`: serves the metrics of a run, and prints the Grafana dashboard and the alert rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import option, positional
from meshwright.base.io import printable, write_output


def metrics_serve(
    run: Annotated[Path, positional("RUN", "folder of a run that is running, finished or failed")],
    port: Annotated[int, option("PORT", "port to serve /metrics on")] = 9400,
    host: Annotated[str, option("HOST", "address of this machine to serve on")] = "127.0.0.1",
    otlp: Annotated[str, option("ADDRESS", "OpenTelemetry collector to push to as well")] = "",
) -> None:
    """Metrics serve: serve the metrics of a run for Prometheus until Ctrl-C, as metrics.port does while it trains."""
    import threading

    from meshwright.base.config import MetricsConfig
    from meshwright.base.records.run_folder import RunFolder
    from meshwright.insight.metrics.exporter import require_otlp_package
    from meshwright.insight.metrics.exporter_process import export_run

    require_otlp_package(MetricsConfig(port, host, otlp))

    def report(address: str) -> None:
        print(f"metrics of {printable(str(run))}: {address}metrics", flush=True)

    export_run(RunFolder(run), host, port, otlp, threading.Event(), report)


Out = Annotated[Path | None, option("FILE", "file to write (default: standard output)")]


def metrics_dashboard(out: Out = None) -> None:
    """Metrics dashboard: print the Grafana dashboard of the metrics, as JSON to import."""
    import json

    from meshwright.insight.metrics.dashboard import dashboard

    write(json.dumps(dashboard(), indent=1) + "\n", out)


def metrics_alerts(out: Out = None) -> None:
    """Metrics alerts: print the Prometheus alert rules of the metrics, as a YAML rule file."""
    from meshwright.insight.metrics.alerts import alert_rules

    write(alert_rules(), out)


def write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
    else:
        write_output(out, text, "--out")
