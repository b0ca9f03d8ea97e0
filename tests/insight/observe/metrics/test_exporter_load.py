"""The exporter of a large run stays small under many, slow and hostile readers."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from meshwright.base.config import MetricsConfig
from meshwright.insight.metrics.exporter import RunExporter
from tests.insight.observe.metrics.exported_run import record_run
from tests.insight.observe.metrics.scraping import READERS, free_port, scrape, scrape_many, send_garbage, wait_for
from tests.kit.raw_requests import connect, get

MAX_MEMORY = 400 << 20
RANKS, STEPS, ROUNDS = 64, 300, 2


def peak_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.long
def test_memory_of_the_exporter_is_bounded(tmp_path):
    folder, port = record_run(tmp_path / "run", ranks=RANKS, steps=STEPS), free_port()
    exporter = RunExporter(MetricsConfig(port=port), folder)
    exporter.start()
    slow = []
    try:
        assert wait_for(lambda: scrape(port))["meshwright_steps_total", ""] == STEPS
        slow += [connect(port) for _ in range(250)]
        for number, client in enumerate(slow):
            client.sendall(get("/metrics") if number % 2 else b"GET /metrics HTTP/1.1\r\nHost: loc")
        for _ in range(ROUNDS):
            garbage = threading.Thread(target=send_garbage, args=(port,))
            garbage.start()
            answers = asyncio.run(scrape_many(f"http://127.0.0.1:{port}/metrics"))
            garbage.join(60)
            assert [answer.status_code for answer in answers] == [200] * READERS
        assert exporter._process.poll() is None
        assert peak_memory(exporter._process.pid) < MAX_MEMORY
        print(
            f"peak memory of the exporter: {peak_memory(exporter._process.pid) >> 20} MiB, {len(answers[0].content)} B"
        )
    finally:
        for client in slow:
            client.close()
        exporter.close()
