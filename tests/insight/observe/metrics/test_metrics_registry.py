"""The table of metrics follows Prometheus' conventions, and its values are those of the run's records."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.metrics import metric
from meshwright.insight.metrics.collector import OPENMETRICS, TEXT, RunsCollector, follow
from meshwright.insight.metrics.network import read_network_bytes
from meshwright.insight.metrics.registry import METRICS, metric_names
from tests.insight.observe.metrics.exported_run import PHASES, STEP_SECONDS, record_run

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def collector_of(*folders) -> RunsCollector:
    return RunsCollector([follow(RunHistory(folder)) for folder in folders])


def parse_samples(text: str, parse=parser.text_string_to_metric_families) -> Samples:
    """Every sample, by its name and its labels other than `run`."""
    found: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "run"))
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Samples:
    folder = record_run(tmp_path_factory.mktemp("registry") / "recorded")
    return parse_samples(collector_of(folder).encode(TEXT).decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"meshwright_{name}", tuple(sorted(labels.items()))]


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_names_have_base_units_and_suffixes(row):
    assert re.fullmatch(r"meshwright(_[a-z]+)+", row.name)
    assert row.name.endswith("_total") == (row.kind == "counter")
    if row.unit:
        assert row.name.removesuffix("_total").endswith(f"_{row.unit}")
        assert row.unit in ("seconds", "bytes", "ratio", "samples")
    assert all(re.fullmatch(r"[a-z]+", label) and label != "run" for label in row.labels)
    assert row.help.endswith(".")


def test_names_are_unique():
    assert len({row.name for row in METRICS}) == len(METRICS)


def test_every_metric_has_a_sample(samples):
    assert {name for name, _ in samples} == metric_names()


def test_values_are_those_of_the_records(samples):
    assert value(samples, "run_state", state="progressing") == 1
    assert sum(value for (name, _), value in samples.items() if name == "meshwright_run_state") == 1
    assert value(samples, "run_alive") == 1
    assert value(samples, "ranks") == 2
    assert value(samples, "completed_steps") == 12
    assert value(samples, "planned_steps") == 100
    assert value(samples, "steps_total") == 12
    assert value(samples, "tokens_total") == 12 * 64
    assert value(samples, "samples_total") == 12 * 4
    assert value(samples, "loss") == pytest.approx(2.89)
    assert value(samples, "evaluation_loss") == 2.25
    assert value(samples, "grad_norm") == 1.5
    assert value(samples, "loss_scale") == 1024
    assert value(samples, "gradient_noise_scale_samples") == 7.5
    assert value(samples, "skipped_steps_total") == 1
    assert value(samples, "mfu_ratio") == pytest.approx(2e12 / STEP_SECONDS / 4e13)


def test_values_of_ranks_and_communication(samples):
    assert value(samples, "rank_step_seconds", rank="1") == STEP_SECONDS
    assert value(samples, "phase_seconds_total", rank="1", phase="forward") == pytest.approx(12 * PHASES["forward"])
    assert value(samples, "loader_wait_seconds", rank="0") == pytest.approx(PHASES["fetch"])
    assert value(samples, "exposed_communication_ratio") == pytest.approx(0.2 / STEP_SECONDS)
    assert value(samples, "exposed_communication_seconds", rank="0") == pytest.approx(0.2)
    assert value(samples, "wait_seconds", rank="0", phase="backward") == pytest.approx(0.06)
    assert value(samples, "gradient_bucket_bytes") == 800
    shared = {"rank": "0", "axis": "replicate", "collective": "all_reduce"}
    assert value(samples, "collective_message_bytes", **shared) == 800
    assert value(samples, "collective_wire_bytes", **shared) == 400
    assert value(samples, "memory_at_peak_bytes", **{"rank": "1", "class": "gradient"}) == 500
    assert value(samples, "peak_memory_bytes", rank="1") == 1_000_001
    assert value(samples, "heartbeat_step", rank="0") == 11
    assert value(samples, "stragglers_total", rank="1") == 1
    assert value(samples, "stragglers_total", rank="0") == 0
    assert value(samples, "expert_load_ratio", block="0") == 2
    assert value(samples, "expert_load_ratio", block="1") == 1


def test_values_of_recovery(samples):
    assert value(samples, "checkpoint_step") == 8
    assert value(samples, "steps_at_risk") == 4
    assert value(samples, "checkpoints_total") == 1
    assert value(samples, "checkpoint_bytes") == 4096
    assert value(samples, "checkpoint_save_seconds") == 1.5
    assert value(samples, "checkpoint_stall_seconds_total") == 0.25
    assert value(samples, "checkpoint_failures_total") == 1
    assert value(samples, "restarts_total") == 0
    parts = [found for (name, _), found in samples.items() if name == "meshwright_goodput_part_seconds"]
    assert value(samples, "goodput_ratio") == pytest.approx(
        value(samples, "goodput_part_seconds", part="productive") / sum(parts)
    )


def test_values_of_rollouts_and_their_account(samples):
    assert value(samples, "reward") == 0.5
    assert value(samples, "policy_clipped_ratio") == 0.125
    assert value(samples, "rollouts", fate="trained") == 96
    assert value(samples, "rollouts", fate="no_signal") == 96
    assert value(samples, "rollouts", fate="duplicate") == 0
    fates = [number for (name, _), number in samples.items() if name == "meshwright_rollouts"]
    assert sum(fates) == value(samples, "rollouts_generated") == 200
    assert value(samples, "generator_idle_ratio") == pytest.approx(0.1)
    assert value(samples, "learner_idle_ratio") == pytest.approx(0.5)
    assert value(samples, "rollout_problems_total") == 1


def test_step_time_histogram_counts_every_step(samples):
    assert value(samples, "step_seconds_count") == 12
    assert value(samples, "step_seconds_sum") == pytest.approx(12 * STEP_SECONDS)
    assert value(samples, "step_seconds_bucket", le="0.25") == 0
    assert value(samples, "step_seconds_bucket", le="0.5") == 12
    assert value(samples, "step_seconds_bucket", le="+Inf") == 12


def test_openmetrics_has_the_same_samples(tmp_path):
    collector = collector_of(record_run(tmp_path / "run"))
    plain = parse_samples(collector.encode(TEXT).decode())
    rich = parse_samples(collector.encode(OPENMETRICS).decode(), openmetrics_parser.text_string_to_metric_families)
    assert plain == rich


def test_many_ranks_are_aggregated(tmp_path, monkeypatch):
    monkeypatch.setattr(metric, "MAX_RANKS", 2)
    found = parse_samples(collector_of(record_run(tmp_path / "run", ranks=3)).encode(TEXT).decode())
    ranks = {dict(labels)["rank"] for (_, labels) in found if "rank" in dict(labels)}
    assert ranks == {"min", "median", "max", "sum"}
    assert value(found, "peak_memory_bytes", rank="median") == 1_000_001
    assert value(found, "peak_memory_bytes", rank="max") == 1_000_002
    assert value(found, "stragglers_total", rank="sum") == 1
    assert value(found, "phase_seconds_total", rank="sum", phase="update") == pytest.approx(36 * PHASES["update"])


def test_runs_of_the_same_name_have_series_of_their_own(tmp_path):
    first, second = record_run(tmp_path / "a" / "run"), record_run(tmp_path / "b" / "run", steps=5)
    text = collector_of(first, second).encode(TEXT).decode()
    found = {
        sample.labels["run"]: sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "meshwright_steps_total"
    }
    assert found == {"a/run": 12, "b/run": 5}


def test_labels_from_records_cannot_break_the_format(tmp_path):
    folder = record_run(tmp_path / 'a"b\\c\nd\udcff')
    with folder.events(0).open("a") as file:
        start = {"kind": "start", "attempt": 1, "rank": 0, "steps": 100, "ranks": 2, "layout": 'x"}\n1\n' + "y" * 9999}
        rows = [{"axis": 'a"\n', "collective": "c" * 999, "message_bytes": 1, "wire_bytes": 1}] * 200
        counters = {"kind": "counters", "attempt": 1, "rank": 0, "step": 1, "communication": rows}
        counters["memory"] = {"peak_total": 1, "at_peak": {"\ud800": 1}, "peak": {}}
        file.writelines(json.dumps(event, separators=(",", ":")) + "\n" for event in (start, counters))
    samples = parse_samples(collector_of(folder).encode(TEXT).decode())
    assert value(samples, "steps_total") == 12
    shared = {"rank": "0", "axis": 'a" ', "collective": "c" * 64}
    assert value(samples, "collective_message_bytes", **shared) == 200
    assert value(samples, "memory_at_peak_bytes", **{"rank": "0", "class": "?"}) == 1


@pytest.mark.parametrize("identity", ["[]", '{"timeline": Infinity}', '{"until": {"1": 1e999}}'])
def test_folder_that_is_not_complete_has_the_metrics_that_are_known(tmp_path, identity):
    folder = record_run(tmp_path / "run", ranks=1, steps=0)
    folder.plan_file.unlink()
    folder.identity_file.write_text(identity)
    samples = parse_samples(collector_of(folder).encode(TEXT).decode())
    assert value(samples, "run_state", state="starting") == 1
    assert ("meshwright_loss", ()) not in samples


def test_network_bytes_are_those_of_the_busiest_interfaces(tmp_path):
    table = "Inter-|   Receive\n face |bytes packets\n" + "".join(
        f"  eth{number}: {number} 0 0 0 0 0 0 0 {2 * number} 0 0 0 0 0 0 0\n" for number in range(40)
    )
    (tmp_path / "dev").write_text(table + "torn: 1\n")
    found = read_network_bytes(tmp_path / "dev")
    assert len(found) == 32
    assert found["eth39"] == (39, 78)
    assert read_network_bytes(tmp_path / "absent") == {}


def test_page_has_the_tables_of_metrics_and_alerts():
    """If this fails, run `python docs/write_metrics_reference.py`."""
    docs = Path(__file__).parents[4] / "docs"
    script = runpy.run_path(str(docs / "write_metrics_reference.py"))
    page = (docs / "metrics.md").read_text()
    assert page == script["metrics_reference"](page)
    assert all(f"| `{row.name}` |" in page for row in METRICS)
