"""Metrics and spans reach an OpenTelemetry collector, and a missing package or collector does not stop a run."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from meshwright.base.config import MetricsConfig
from meshwright.base.history.run_history import RunHistory
from meshwright.errors import ConfigError
from meshwright.insight.metrics import exporter
from meshwright.insight.metrics.collector import RunsCollector, follow
from tests.insight.observe.metrics.exported_run import PHASES, STEP_SECONDS, record_run
from tests.insight.observe.metrics.scraping import free_port, scrape, wait_for

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra opentelemetry is not installed")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from meshwright.insight.metrics import otlp

REQUESTS = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


@pytest.fixture(scope="module")
def receiver():
    """A collector on the loopback interface; `received` has the decoded requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            self.server.received.append(REQUESTS[self.path].FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.received = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="module")
def pushed(receiver, tmp_path_factory):
    """What two pushes of a recorded run send: (metrics requests, spans)."""
    folder = record_run(tmp_path_factory.mktemp("otlp") / "run")
    pusher = otlp.OtlpPusher(f"http://127.0.0.1:{receiver.server_port}/", RunsCollector([follow(RunHistory(folder))]))
    pusher.push()
    pusher.push()
    metrics = [request for request in receiver.received if isinstance(request, ExportMetricsServiceRequest)]
    traces = [request for request in receiver.received if isinstance(request, ExportTraceServiceRequest)]
    spans = [
        span for request in traces for resource in request.resource_spans for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip
    return metrics, spans


def attributes(values) -> dict:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in values}


def test_metrics_of_the_registry_are_pushed(pushed):
    requests, _ = pushed
    assert len(requests) == 2
    resource = requests[0].resource_metrics[0]
    about = attributes(resource.resource.attributes)
    assert about["service.name"] == "meshwright"
    assert (about["meshwright.run"], about["meshwright.run.id"]) == ("run", "0123456789abcdef")
    assert about["host.name"]
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    loss = found["meshwright_loss"].gauge.data_points[0]
    assert loss.as_double == pytest.approx(2.89)
    assert attributes(loss.attributes) == {"run": "run"}
    phases = found["meshwright_phase_seconds_total"]
    assert phases.sum.is_monotonic
    assert phases.unit == "s"
    values = {tuple(sorted(attributes(p.attributes).items())): p.as_double for p in phases.sum.data_points}
    labels = (("phase", "forward"), ("rank", "1"), ("run", "run"))
    assert values[labels] == pytest.approx(12 * PHASES["forward"])
    steps = found["meshwright_step_seconds"].histogram.data_points[0]
    assert (steps.count, steps.sum) == (12, pytest.approx(12 * STEP_SECONDS))
    assert sum(steps.bucket_counts) == 12
    assert len(steps.bucket_counts) == len(steps.explicit_bounds) + 1


def test_every_step_is_pushed_once_as_a_trace(pushed):
    _, spans = pushed
    steps = [span for span in spans if span.name == "step"]
    assert len(steps) == 12 * 2
    assert len({span.span_id for span in spans}) == len(spans) == 12 * 2 * (1 + len(PHASES))
    assert len({span.trace_id for span in spans}) == 12


def test_spans_of_phases_fill_their_step(pushed):
    _, spans = pushed
    step = next(span for span in spans if span.name == "step" and attributes(span.attributes)["meshwright.rank"] == 1)
    root = next(span for span in spans if span.trace_id == step.trace_id and not span.parent_span_id)
    assert root.name == "step"
    assert step.parent_span_id == root.span_id
    phases = [span for span in spans if span.parent_span_id == step.span_id]
    assert [span.name for span in phases] == list(PHASES)
    assert phases[0].start_time_unix_nano == step.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == pytest.approx(step.end_time_unix_nano, abs=1e3)
    for span, following in pairwise(phases):
        assert span.end_time_unix_nano == following.start_time_unix_nano
    assert attributes(phases[2].attributes)["meshwright.wait_seconds"] == pytest.approx(0.04)


def test_collector_that_cannot_be_reached_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(otlp, "TIMEOUT", 0.2)
    pusher = otlp.OtlpPusher("http://127.0.0.1:1", RunsCollector([follow(RunHistory(record_run(tmp_path / "run")))]))
    pusher.push()
    pusher.push()
    assert capsys.readouterr().err.splitlines() == [
        "meshwright: metrics.otlp: http://127.0.0.1:1 does not accept the metrics; pushing continues"
    ]


def test_missing_package_is_a_config_error_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "OTLP_PACKAGE", "absent_package.of.ours")
    settings = MetricsConfig(otlp="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"metrics.otlp needs the package .*; try pip install 'meshwright\[opentele"):
        exporter.RunExporter(settings, tmp_path)
    exporter.RunExporter(MetricsConfig(port=9400), tmp_path)


def test_address_of_the_collector_is_validated():
    with pytest.raises(ConfigError, match=r"metrics.otlp = 127.0.0.1:4318; expected an address such as http://"):
        MetricsConfig(otlp="127.0.0.1:4318")


@pytest.mark.long
def test_exporter_pushes_a_last_time_when_the_run_ends(receiver, tmp_path):
    port = free_port()
    settings = MetricsConfig(port=port, otlp=f"http://127.0.0.1:{receiver.server_port}")
    running = exporter.RunExporter(settings, record_run(tmp_path / "last"))
    running.start()
    try:
        assert wait_for(lambda: scrape(port))
    finally:
        running.close()
    runs = [
        attributes(resource.resource.attributes)["meshwright.run"]
        for request in receiver.received
        if isinstance(request, ExportMetricsServiceRequest)
        for resource in request.resource_metrics
    ]
    assert "last" in runs
