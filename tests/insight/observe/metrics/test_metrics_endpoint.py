"""The endpoint /metrics: formats, caching, and many, slow and hostile clients at once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import parser
from starlette.testclient import TestClient

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.metrics import collector as collector_module
from meshwright.insight.metrics.collector import OPENMETRICS, TEXT, RunsCollector
from meshwright.insight.metrics.endpoint import metrics_application
from meshwright.insight.watch.http_server import HttpServer
from tests.insight.observe.metrics.exported_run import record_run
from tests.insight.observe.metrics.scraping import READERS, scrape_many, send_garbage
from tests.kit.raw_requests import connect, get


class CountingRun:
    """A run that counts how often it is read."""

    def __init__(self, folder) -> None:
        self.history, self.reads = RunHistory(folder), 0

    def __call__(self) -> RunHistory:
        self.reads += 1
        self.history.update()
        return self.history


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("endpoint") / "run")


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPENMETRICS),
        ("text/plain", TEXT),
        ("*/*", TEXT),
        ("", TEXT),
        (";;;,,version=abc" * 50, TEXT),
    ],
    ids=["Prometheus", "text", "any", "none", "garbage"],
)
def test_scraper_gets_the_format_that_it_accepts(folder, accept, content_type):
    client = TestClient(metrics_application(RunsCollector([CountingRun(folder)])))
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == content_type
    assert answer.text.endswith("# EOF\n") == (content_type == OPENMETRICS)
    assert client.get("/").status_code == 404


def test_scrapes_within_a_second_cost_one_read(folder, monkeypatch):
    monkeypatch.setattr(collector_module, "CACHE_SECONDS", 1e9)
    run = CountingRun(folder)
    collector = RunsCollector([run])
    assert run.reads == 0
    first = collector.encode(TEXT)
    assert collector.encode(TEXT) is first
    collector.encode(OPENMETRICS)
    collector.snapshots()
    assert run.reads == 1
    collector._valid_until = 0.0
    collector.encode(TEXT)
    assert run.reads == 2


def test_concurrent_slow_and_hostile_clients_are_served_from_one_read(folder, monkeypatch):
    monkeypatch.setattr(collector_module, "CACHE_SECONDS", 1e9)
    run = CountingRun(folder)
    server = HttpServer(metrics_application(RunsCollector([run])), port=0)
    server.start()
    silent = [connect(server.port) for _ in range(100)]
    try:
        for number, client in enumerate(silent):  # slow clients: part of a request, or a request without a reader
            client.sendall(get("/metrics") if number % 2 else b"GET /metrics HTTP/1.1\r\nHost: loc")
        garbage = threading.Thread(target=send_garbage, args=(server.port,))
        garbage.start()
        answers = asyncio.run(scrape_many(f"{server.address}metrics"))
        garbage.join(60)
        assert not garbage.is_alive()
    finally:
        for client in silent:
            client.close()
        server.stop()
    assert not server.failure
    assert [answer.status_code for answer in answers] == [200] * READERS
    assert {answer.content for answer in answers} == {answers[0].content}
    assert any(family.name == "meshwright_loss" for family in parser.text_string_to_metric_families(answers[0].text))
    assert run.reads == 1
