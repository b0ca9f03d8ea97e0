"""Pushes the metrics of runs, and their steps as spans, to an OpenTelemetry collector by OTLP. Torch-free.

Needs the extra `opentelemetry`. What is pushed is the same registry that Prometheus scrapes: the data points are made
from it directly, without instruments.
"""

from __future__ import annotations

import logging
import socket
import time

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as MetricData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from meshwright.core.recover.supervisor import warn
from meshwright.insight.metrics.collector import RunsCollector
from meshwright.insight.metrics.metric import Histogram, Metric, Snapshot
from meshwright.insight.metrics.registry import METRICS
from meshwright.insight.metrics.step_spans import StepSpans
from meshwright.version import __version__

TIMEOUT = 5.0
"""Seconds that one push may take, with its retries."""
SCOPE = InstrumentationScope("meshwright", __version__)
UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
"""Units of the registry -> those of OpenTelemetry."""
NANOSECONDS = 10**9


class OtlpPusher:
    """Pushes what is known about runs. A collector that cannot be reached is reported once."""

    def __init__(self, address: str, collector: RunsCollector) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a failed push is reported below
        self._address, self._collector = address.rstrip("/"), collector
        self._metrics = OTLPMetricExporter(f"{self._address}/v1/metrics", timeout=TIMEOUT)
        self._spans = OTLPSpanExporter(f"{self._address}/v1/traces", timeout=TIMEOUT)
        self._new_spans: dict[str, StepSpans] = {}
        self._reported = False

    def push(self) -> None:
        """Pushes the current metrics, and the steps that were recorded since the last push."""
        snapshots = self._collector.snapshots()
        pushed = self._metrics.export(metrics_data(snapshots)) == MetricExportResult.SUCCESS
        for snapshot in snapshots:
            spans = self._new_spans.setdefault(snapshot.run, StepSpans(make_resource(snapshot), SCOPE))
            for batch in spans.new_batches(snapshot):
                pushed = pushed and self._spans.export(batch) == SpanExportResult.SUCCESS
        if not pushed and not self._reported:
            self._reported = True
            warn(f"metrics.otlp: {self._address} does not accept the metrics; pushing continues")


def make_resource(snapshot: Snapshot) -> Resource:
    """What the data is about: the run, and this host."""
    return Resource(
        {
            "service.name": "meshwright",
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "meshwright.run": snapshot.run,
            "meshwright.run.id": snapshot.run_id,
        }
    )


def metrics_data(snapshots: list[Snapshot], now: float | None = None) -> MetricsData:
    """The metrics of runs as OTLP data points, one resource per run."""
    at = int((time.time() if now is None else now) * NANOSECONDS)
    resources = []
    for snapshot in snapshots:
        found = [data for metric in METRICS if (data := metric_data(metric, snapshot, at)) is not None]
        resources.append(ResourceMetrics(make_resource(snapshot), [ScopeMetrics(SCOPE, found, "")], ""))
    return MetricsData(resources)


def metric_data(metric: Metric, snapshot: Snapshot, at: int) -> MetricData | None:
    """One metric with its data points; None without any. Counters count since the run began."""
    numbers: list[NumberDataPoint] = []
    histograms: list[HistogramDataPoint] = []
    started = snapshot.history.attempts[0].started if snapshot.history.attempts else None
    begin = min(at, int((started or 0.0) * NANOSECONDS))
    for values, reading in metric.readings(snapshot):
        labels = {"run": snapshot.run, **dict(zip(metric.labels, values, strict=True))}
        if isinstance(reading, Histogram):
            histograms.append(histogram_point(reading, labels, begin, at))
        else:
            numbers.append(NumberDataPoint(labels, begin, at, reading))
    cumulative = AggregationTemporality.CUMULATIVE
    data: Gauge | Sum | HistogramData
    if histograms:
        data = HistogramData(histograms, cumulative)
    elif not numbers:
        return None
    else:
        data = Sum(numbers, cumulative, is_monotonic=True) if metric.kind == "counter" else Gauge(numbers)
    return MetricData(metric.name, metric.help, UNITS.get(metric.unit, ""), data)


def histogram_point(found: Histogram, labels: dict[str, str], begin: int, at: int) -> HistogramDataPoint:
    """OTLP counts the values of each bucket by itself, and Prometheus those up to its bound."""
    bounds, totals = zip(*found.buckets, strict=True)
    counts = [total - before for total, before in zip(totals, (0, *totals), strict=False)]
    return HistogramDataPoint(labels, begin, at, totals[-1], found.sum, counts, bounds[:-1], 0.0, 0.0)
