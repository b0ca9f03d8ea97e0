"""A real Prometheus server scrapes a running job, and fires the alert of a stalled one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import httpx
import pytest

from meshwright.insight.metrics.alerts import alert_rules
from tests.insight.observe.metrics.scraping import free_port, wait_for
from tests.kit.small_run import SMALL

PROMETHEUS = shutil.which("prometheus")
CONFIG = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: [meshwright.yml]
scrape_configs:
  - job_name: meshwright
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not installed"),
]


@contextmanager
def ended(process: subprocess.Popen):
    """Ends a process at the end of the test: with SIGTERM, then with a second one, then with SIGKILL."""
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)


@pytest.fixture
def query(tmp_path):
    """Starts a Prometheus server that scrapes a port, and returns a function that asks it: path -> the data."""
    servers = []

    def start(target: int):
        port, folder = free_port(), tmp_path / "prometheus"
        folder.mkdir()
        (folder / "prometheus.yml").write_text(CONFIG.format(port=target))
        (folder / "meshwright.yml").write_text(alert_rules(scale=0.01))
        command = [
            PROMETHEUS,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        servers.append(subprocess.Popen(command))

        def ask(path: str):
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10)
            return answer.raise_for_status().json()["data"]

        return ask

    yield start
    for server in servers:
        server.terminate()
        server.wait(30)


def test_prometheus_scrapes_a_running_job_and_fires_the_alert_of_a_stalled_one(tmp_path, query):
    port = free_port()
    command = [sys.executable, "-m", "meshwright", "train", "--run", str(tmp_path / "job"), "--ranks=2", "--steps=1000"]
    settings = [*SMALL, f"--metrics.port={port}", "--launch.hang_timeout=900", "--launch.collective_timeout=900"]
    environment = os.environ | {"MESHWRIGHT_FAULT": "step.forward:slow=0.05,step.backward:rank1:hang@step60"}
    ask = query(port)
    with ended(subprocess.Popen([*command, *settings], env=environment, stdout=subprocess.DEVNULL)) as job:

        def steps() -> float:
            found = ask("query?query=meshwright_steps_total")["result"]
            return float(found[0]["value"][1]) if found else 0.0

        first = wait_for(steps)
        assert wait_for(lambda: steps() > first)
        rates = ask("query?query=meshwright_run_state%7Bstate=%22progressing%22%7D")["result"]
        assert [sample["metric"]["run"] for sample in rates] == ["job"]

        def stalled():
            alerts = ask("alerts")["alerts"]
            return [a for a in alerts if a["labels"]["alertname"] == "MeshwrightRunStalled" and a["state"] == "firing"]

        (alert,) = wait_for(stalled, 120)
        assert alert["labels"]["run"] == "job"
        assert alert["labels"]["severity"] == "critical"
        assert alert["annotations"]["summary"] == "Run job is alive and makes no progress."
        assert job.poll() is None
        up = ask("query?query=up")["result"]
        assert [sample["value"][1] for sample in up] == ["1"]
