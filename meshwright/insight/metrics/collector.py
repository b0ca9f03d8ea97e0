"""Reads the metrics of runs at most once per second, and encodes them for Prometheus. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.history.goodput import goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import read_signals
from meshwright.base.io import read_json
from meshwright.errors import MeshwrightError
from meshwright.insight.metrics.metric import Histogram, Metric, Snapshot, label_text
from meshwright.insight.metrics.network import read_network_bytes
from meshwright.insight.metrics.registry import METRICS

CACHE_SECONDS = 1.0
"""Any number of scrapers within this time cost one read of the run folder."""
MAX_READING_SHARE = 0.05
"""Share of a core that reading takes at most: what took long to read is kept for longer."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: str = openmetrics.CONTENT_TYPE_LATEST
FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}

UpdatedHistory = Callable[[], RunHistory]
"""Returns the history of a run as it is now."""


def follow(history: RunHistory) -> UpdatedHistory:
    """A history that is read again whenever it is asked for."""

    def updated() -> RunHistory:
        history.update()
        return history

    return updated


def take_snapshot(history: RunHistory, run: str) -> Snapshot:
    """What is known about a run now."""
    now = time.time()
    return Snapshot(
        history,
        read_signals(history, now),
        goodput(history, now),
        run,
        read_run_id(history),
        time.monotonic(),
        read_network_bytes(),
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """The names of different run folders, with as many of the folders that contain them as make the names different."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [str(Path(*folder.parts[-parts:])) for folder in folders]
        if len(set(names)) == len(folders):
            break
    return [label_text(name) for name in names]


def read_run_id(history: RunHistory) -> str:
    """The id of the run; empty before it has one."""
    try:
        return RunLineage.from_identity(read_json(history.folder.identity_file)).run[:64]
    except (MeshwrightError, OSError, ValueError, AttributeError, TypeError):
        return ""


class RunsCollector(Collector):
    """The metrics of one or several runs, as prometheus_client collects them. It may be used from several threads."""

    def __init__(self, runs: Sequence[UpdatedHistory]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._snapshots: list[Snapshot] = []
        self._valid_until = float("-inf")
        self._encoded: dict[str, bytes] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def snapshots(self) -> list[Snapshot]:
        """What is known about every run, as of the last second or so."""
        with self._lock:
            self._refresh()
            return self._snapshots

    def encode(self, content_type: str) -> bytes:
        """The metrics as text of this content type: TEXT or OPENMETRICS."""
        with self._lock:
            self._refresh()
            if content_type not in self._encoded:
                generate = openmetrics.generate_latest if content_type == OPENMETRICS else generate_latest
                self._encoded[content_type] = generate(self._registry)
            return self._encoded[content_type]

    def _refresh(self) -> None:
        if time.monotonic() > self._valid_until:
            began = time.thread_time()
            histories = {history.folder.root.absolute(): history for history in (updated() for updated in self._runs)}
            names = run_names(list(histories))
            self._snapshots = [take_snapshot(*pair) for pair in zip(histories.values(), names, strict=True)]
            self._encoded = {}
            spent = time.thread_time() - began
            self._valid_until = time.monotonic() + max(CACHE_SECONDS, spent / MAX_READING_SHARE)

    def describe(self) -> list[Family]:
        return []  # registering the collector reads nothing

    def collect(self) -> Iterator[Family]:
        """The families of all metrics; those without a sample are left out."""
        for metric in METRICS:
            family = make_family(metric)
            for snapshot in self._snapshots:
                for labels, value in metric.readings(snapshot):
                    add_sample(family, [snapshot.run, *labels], value)
            if family.samples:
                yield family


def make_family(metric: Metric) -> Family:
    """A family without samples. The text format has no units; OpenMetrics wants them where the name has one."""
    unit = metric.unit if metric.name.removesuffix("_total").endswith(f"_{metric.unit}") else ""
    family: Family = FAMILIES[metric.kind](metric.name, metric.help, labels=("run", *metric.labels), unit=unit)
    return family


def add_sample(family: Family, labels: list[str], value: float | Histogram) -> None:
    if isinstance(value, Histogram):
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, [("+Inf" if b == float("inf") else f"{b:g}", n) for b, n in value.buckets], value.sum)
    else:
        assert isinstance(family, (GaugeMetricFamily, CounterMetricFamily))
        family.add_metric(labels, value)
