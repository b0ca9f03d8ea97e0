"""The exporter lasts as long as the run, through restarts, and its failure is one warning."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest

from meshwright import Callback, train
from meshwright.base.cli import main
from meshwright.base.config import MetricsConfig
from meshwright.insight.metrics import exporter_process
from meshwright.insight.metrics.exporter import REPORTED, RunExporter
from tests.insight.observe.metrics.exported_run import record_run
from tests.insight.observe.metrics.scraping import TIMEOUT, free_port, is_refused, scrape, wait_for
from tests.kit.small_run import small_config


class WaitForScrape(Callback):
    """Lets every attempt go on after its second step only when a scrape has seen the attempt."""

    def on_step(self, record, run) -> None:
        deadline = time.monotonic() + TIMEOUT
        while record["step"] >= run.first_step + 1 and not (run.path / f"scraped-{run.attempt}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_running_job_is_scraped_through_a_restart_until_it_ends(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MESHWRIGHT_FAULT", "step.backward:rank1:kill@step4")
    port, folder = free_port(), tmp_path / "run"
    seen: list[dict[tuple[str, str], float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with suppress(httpx.HTTPError):
                seen.append(scrape(port))
                if seen[-1]["meshwright_run_state", "restarting"] == 0 and seen[-1]["meshwright_steps_total", ""] > 1:
                    (folder / f"scraped-{1 + seen[-1]['meshwright_restarts_total', '']:.0f}").touch()
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        config = small_config(f"--metrics.port={port}", "--checkpoint.every=2", steps=8)
        result = train(config, run=folder, quiet=True, callbacks=WaitForScrape())
    finally:
        done.set()
        watcher.join(TIMEOUT)
    assert result.steps == 8
    assert is_refused(port)
    restarts = [samples["meshwright_restarts_total", ""] for samples in seen]
    assert (restarts[0], restarts[-1]) == (0, 1)
    assert restarts == sorted(restarts)
    assert seen[-1]["meshwright_planned_steps", ""] == 8
    assert "exporter" not in capfd.readouterr().err


@pytest.fixture
def folder(tmp_path):
    return record_run(tmp_path / "run")


def test_port_in_use_is_one_warning(folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exporter = RunExporter(MetricsConfig(port=port), folder)
        exporter.start()
        exporter.start()
        assert exporter._process.wait(TIMEOUT) == REPORTED
        exporter.check()
        exporter.check()
        exporter.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("meshwright: the metrics are not exported, and the training continues: ")
    assert f"127.0.0.1 port {port} cannot be used" in lines[0]


def test_exporter_that_is_killed_is_one_warning_and_close_ends_it(folder, capfd):
    exporter = RunExporter(MetricsConfig(port=free_port()), folder)
    exporter.start()
    exporter._process.kill()
    exporter._process.wait(TIMEOUT)
    exporter.check()
    exporter.check()
    exporter.close()
    expected = "meshwright: the exporter of the metrics ended with signal 9; the training continues without it"
    assert capfd.readouterr().err.splitlines() == [expected]


def test_exporter_ends_with_its_parent(folder):
    port = free_port()
    program = (
        "import sys, time; from pathlib import Path; from meshwright.base.config import MetricsConfig\n"
        "from meshwright.insight.metrics.exporter import RunExporter\n"
        "from meshwright.base.records.run_folder import RunFolder\n"
        "RunExporter(MetricsConfig(port=int(sys.argv[1])), RunFolder(Path(sys.argv[2]))).start(); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(port), str(folder.root)])
    try:
        assert wait_for(lambda: scrape(port))["meshwright_run_alive", ""] == 1
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(TIMEOUT)
    assert wait_for(lambda: is_refused(port))


def test_nothing_is_started_by_default(folder):
    exporter = RunExporter(MetricsConfig(), folder)
    exporter.start()
    assert exporter._process is None
    exporter.close()


def test_serve_reports_a_mistake_in_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporter_process, "BIND_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistakes = {
            "is not a run folder": [str(tmp_path / "absent")],
            f"port {port} cannot be used": [str(folder.root), f"--port={port}"],
            "port 99999 cannot be used": [str(folder.root), "--port=99999"],
            "metrics.otlp = 127.0.0.1:1; expected an address": [str(folder.root), "--otlp=127.0.0.1:1"],
        }
        for message, arguments in mistakes.items():
            with pytest.raises(SystemExit) as stop:
                main(["metrics", "serve", *arguments])
            error = capsys.readouterr().err
            assert stop.value.code == 2
            assert error.count("\n") == 1
            assert message in error


def test_serve_serves_a_run_until_it_is_interrupted(folder):
    port = free_port()
    command = [sys.executable, "-m", "meshwright", "metrics", "serve", str(folder.root), f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip().endswith(f"http://127.0.0.1:{port}/metrics")
        assert scrape(port)["meshwright_completed_steps", ""] == 12
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
