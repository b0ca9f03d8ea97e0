"""Tests of the live page's answers: what they contain, and that untrusted folders and requests do no harm."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from meshwright.base.history.account import PARTS
from meshwright.base.history.signals import STATES
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.watch.page.routes import make_page
from meshwright.insight.watch.page.watched_run import WatchedRun
from meshwright.insight.watch.security import RequestGuard
from tests.insight.observe.watch.written_run import write_run

STATIC = Path(__file__).parents[4] / "meshwright/insight/watch/static"


def page(*folders: Path) -> TestClient:
    application = make_page([RunFolder(folder) for folder in folders])
    return TestClient(RequestGuard(application, "127.0.0.1"), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "slow", spike=30)


@pytest.fixture(scope="module")
def client(run) -> TestClient:
    return page(run)


def test_snapshot_has_signals_goodput_attempts_and_checkpoints(client):
    snapshot = client.get("/api/runs/0/snapshot").json()
    assert snapshot["signals"]["state"] == "complete"
    assert snapshot["signals"]["progress"]["done"] == 120
    parts = snapshot["goodput"]["parts"]
    assert sum(parts.values()) == pytest.approx(snapshot["goodput"]["wall_seconds"], abs=1e-6)
    assert parts["lost work"] > 0
    assert [attempt["outcome"] for attempt in snapshot["attempts"]] == ["failed", "complete"]
    assert snapshot["attempts"][0]["incident"]["message"] == "rank 1 was ended by SIGKILL"
    assert {found["state"] for found in snapshot["checkpoints"]} == {"published", "deleted"}
    assert [row["rank"] for row in snapshot["memory"]] == [0, 1, 2, 3]
    assert "rank 2 is slow" in snapshot["notices"][0]["message"]


def test_curves_keep_a_spike_in_few_points_and_mark_attempts(client):
    curves = client.get("/api/runs/0/curves?points=50").json()
    assert len(curves["step"]) == 50
    assert max(curves["loss"]["high"]) == pytest.approx(2 + 8 * 0.4724 + 6, abs=0.2)
    assert curves["attempts"] == [{"number": 1, "step": 0}, {"number": 2, "step": 60}]
    zoomed = client.get("/api/runs/0/curves?from=100&to=110").json()
    assert zoomed["step"] == list(range(100, 110))
    stacked = sum(sums[0] for sums in zoomed["phases"].values())
    assert stacked == pytest.approx(4096 / zoomed["throughput"]["mean"][0], rel=1e-2)


def test_heat_map_shows_a_slow_rank_as_a_stripe_of_local_time(client):
    heat_map = client.get("/api/runs/0/heatmap").json()
    assert heat_map["ranks"] == [0, 1, 2, 3]
    local, whole = heat_map["local"]["means"], heat_map["seconds"]["means"]
    assert local[2] > 1.5 * max(local[0], local[1], local[3])
    assert max(whole) == min(whole)  # every rank waits for the slow one
    assert len(heat_map["local"]["cells"]) == 4


def test_timeline_is_drawn_from_spans_and_else_from_the_records(tmp_path):
    folder = write_run(tmp_path / "run", ranks=2, failed_at=None)
    client = page(folder)
    drawn = client.get("/api/runs/0/timeline?step=10").json()
    assert (drawn["step"], drawn["source"], len(drawn["rows"])) == (10, "records", 2)
    for rank in range(2):
        spans = RunFolder(folder).spans(rank)
        spans.parent.mkdir(exist_ok=True)
        lines = [
            {"kind": "rank", "attempt": 1, "rank": rank, "clock_offset": 0.5 * rank, "clock_error": 0.0},
            {
                "kind": "step",
                "attempt": 1,
                "step": 10,
                "begin": 1000.0 + 0.5 * rank,
                "phases": [["forward", 0], ["sync", 400], ["forward", 500], ["backward", 900]],
                "end": 1200,
                "waits": [[950, 1000]],
                "actions": [[0, 0], [0, 1], [0, 1]],
            },
        ]
        spans.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    drawn = page(folder).get("/api/runs/0/timeline?step=10").json()
    assert drawn["source"] == "spans"
    assert drawn["pipeline"] is True
    assert [row["spans"][0][0] for row in drawn["rows"]] == [0.0, 0.0]  # the clocks are aligned
    kinds = [(drawn["kinds"][kind], label) for _, _, kind, label in drawn["rows"][0]["spans"]]
    assert kinds == [("forward", "0"), ("sync", ""), ("forward", "1"), ("backward", "1")]
    assert drawn["rows"][0]["waits"] == [[0.00095, 0.001]]


def test_configs_of_several_runs_show_what_differs(tmp_path):
    one = write_run(tmp_path / "a", steps=4, ranks=1, failed_at=None)
    other = write_run(tmp_path / "b", steps=4, ranks=1, failed_at=None, lr=1e-3)
    differences = page(one, other).get("/api/configs").json()["differences"]
    assert differences == [{"key": "optimizer.lr", "values": ["0.0003", "0.001"]}]


def test_attempt_that_starts_shows_how_far_the_one_before_was(tmp_path):
    folder = write_run(tmp_path / "run", steps=65, failed_at=None, complete=False)
    (folder / "attempts/0002").mkdir()
    client = page(folder)
    snapshot = client.get("/api/runs/0/snapshot").json()
    assert (snapshot["signals"]["progress"]["done"], snapshot["size"]) == (65, 4)
    assert snapshot["signals"]["recovery"]["checkpoint_step"] == 60
    assert snapshot["signals"]["recovery"]["steps_at_risk"] == 5
    assert [mark["number"] for mark in client.get("/api/runs/0/curves").json()["attempts"]] == [1]


def test_notices_of_the_same_rank_are_one_with_a_count(tmp_path):
    folder = write_run(tmp_path / "run", steps=10, failed_at=None)
    straggler = (folder / "events/supervisor.jsonl").read_text().splitlines()[1]
    with open(folder / "events/supervisor.jsonl", "a") as file:
        file.write((straggler + "\n") * 4)
    notices = page(folder).get("/api/runs/0/snapshot").json()["notices"]
    assert [(notice["kind"], notice["rank"], notice["count"]) for notice in notices] == [("straggler", 2, 5)]


def test_new_records_change_the_answers(tmp_path):
    folder = write_run(tmp_path / "run", steps=10, ranks=1, failed_at=None)
    client = page(folder)
    version = client.get("/api/runs/0/snapshot").json()["version"]
    lines = (folder / "events/rank-00000.jsonl").read_text().splitlines()
    step = json.loads(next(line for line in lines if '"kind":"step"' in line))
    with open(folder / "events/rank-00000.jsonl", "a") as file:
        file.write(json.dumps(step | {"step": 10}, separators=(",", ":")) + "\n")
    watched = WatchedRun(0, RunFolder(folder))
    assert json.loads(watched.snapshot())["signals"]["progress"]["done"] == 11
    assert version == 1


@pytest.mark.parametrize(
    "address",
    [
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%2f..%2f..%2fetc/passwd",
        "/static//etc/passwd",
        "/static/uplot/../../page.py",
        "/api/runs/1/snapshot",
        "/api/runs/99999999999999999999/snapshot",
        "/api/runs/-1/snapshot",
        "/api/runs/..%2f0/snapshot",
        "/api/runs/0/unknown",
    ],
)
def test_nothing_but_the_listed_files_and_runs_is_found(client, address):
    answer = client.get(address)
    assert answer.status_code == 404
    assert "import" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "query",
    [
        "curves?points=x",
        "curves?from=-1",
        "curves?to=1e9",
        "curves?points=99999999999999999999999",
        "heatmap?columns=٣",
        "timeline?step=../../etc",
        "log?rank=../../../etc/passwd",
        "log?attempt=1/../..",
        "log?rank=%00",
    ],
)
def test_values_that_are_no_natural_numbers_are_answered_with_400(client, query):
    assert client.get(f"/api/runs/0/{query}").status_code == 400


@pytest.mark.parametrize(
    "query", ["curves?points=0", "curves?from=50&to=10", "heatmap?columns=0&from=999999", "timeline?step=999999"]
)
def test_ranges_without_steps_are_answered(client, query):
    assert client.get(f"/api/runs/0/{query}").status_code == 200


def test_log_is_escaped_bounded_and_never_read_through_a_link(tmp_path):
    folder = write_run(tmp_path / "run", steps=4, ranks=2, failed_at=None)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    log = folder / "attempts/0001/rank-00000.log"
    log.write_text("x" * 5_000_000 + "\n<script>alert(1)</script>\x1b[31m\u202e\n")
    other = folder / "attempts/0001/rank-00001.log"
    other.unlink()
    other.symlink_to(secret)
    client = page(folder)
    answer = client.get("/api/runs/0/log?rank=0&lines=1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["lines"] == ["<script>alert(1)</script>?[31m?"]
    assert len(client.get("/api/runs/0/log?rank=0&lines=999999").content) < 100_000
    assert client.get("/api/runs/0/log?rank=1").json() == {"attempt": 1, "rank": 1, "found": False, "lines": []}
    os.unlink(other)
    os.mkfifo(other)
    assert client.get("/api/runs/0/log?rank=1").json()["found"] is False
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/rank-00000.log").write_text("secret")
    (folder / "attempts/0009").symlink_to(tmp_path / "elsewhere")
    assert client.get("/api/runs/0/log?rank=0&attempt=9").json()["found"] is False


def test_garbage_records_and_spans_are_no_error(tmp_path):
    folder = write_run(tmp_path / "run", steps=6, ranks=2, failed_at=None)
    with open(folder / "events/rank-00001.jsonl", "ab") as file:
        file.write(
            b'{"kind":"step","attempt":1,"rank":1,"step":6,"seconds":1e400,"phases":[]}\n\xff\xfe\n{"kind":"step"}\n[[[[\n'
        )
    (folder / "events/supervisor.jsonl").write_bytes(b'{"kind":"straggler","message":{}}\n{"kind":7}\n')
    trace = RunFolder(folder).spans(0).parent
    trace.mkdir()
    hostile = {
        "kind": "step",
        "attempt": 1,
        "step": 3,
        "begin": 1.0,
        "phases": [["forward", None], 3, ["x", 1], ["sync", -1e300]],
        "end": "x",
        "waits": [[1], ["a", 2], None],
        "actions": "no",
    }
    empty = hostile | {"step": 5, "phases": [3], "end": 4}
    for rank in range(2):
        lines = [json.dumps(span, separators=(",", ":")) + "\n" for span in (hostile, empty)]
        RunFolder(folder).spans(rank).write_text("".join(lines))
    (folder / "plan.json").write_text("[" * 100_000)
    client = page(folder)
    for address in ("snapshot", "curves", "heatmap", "timeline", "timeline?step=3", "timeline?step=5", "log?rank=5"):
        assert client.get(f"/api/runs/0/{address}").status_code == 200


def test_run_that_has_not_started_is_shown(tmp_path):
    (tmp_path / "events").mkdir()
    client = page(tmp_path)
    for address in ("snapshot", "curves", "heatmap", "timeline", "log"):
        assert client.get(f"/api/runs/0/{address}").status_code == 200
    assert client.get("/api/runs/0/snapshot").json()["signals"]["state"] == "starting"


def test_run_folder_that_is_gone_is_answered_with_404(tmp_path):
    folder = write_run(tmp_path / "run", steps=3, ranks=1, failed_at=None)
    client = page(folder)
    folder.rename(tmp_path / "elsewhere")
    answer = client.get("/api/runs/0/snapshot")
    assert answer.status_code == 404
    assert "is not a run folder" in answer.text


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_at_least_4_5(theme):
    colors = re.findall(r"--([a-z-]+\d?): light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "meshwright.css").read_text())
    luminance = {name: relative_luminance(pair[theme]) for name, *pair in colors}
    surfaces = dict.fromkeys(("ink", "soft", "faint"), ("page", "card", "sunk"))
    surfaces |= {name: ("card", f"{name}-fill") for name in ("good", "bad", "warn", "info")}
    pairs = [(text, surface) for text, names in surfaces.items() for surface in names]
    contrasts = {pair: contrast(luminance[pair[0]], luminance[pair[1]]) for pair in pairs}
    assert min(contrasts.values()) >= 4.5, contrasts


def relative_luminance(color: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_page_files_refer_to_nothing_outside(client):
    names = re.findall(r'(?:src|href)="([^"#]*)"', client.get("/").text)
    assert len(names) >= 5
    assert all(name.startswith("/static/") for name in names)
    texts = [client.get(name).text for name in names if "uplot" not in name]
    imported = {name for text in texts for name in re.findall(r'from "\./([a-z]+\.js)"', text)}
    texts += [client.get(f"/static/{name}").text for name in imported]
    assert len(imported) >= 8
    assert not [text for text in texts if "://" in text.replace("http://www.w3.org/2000/svg", "")]


def test_documentation_lists_every_state_part_and_key():
    text = (Path(__file__).parents[4] / "docs/watch.md").read_text()
    listed = {name for row in re.findall(r"^\| ([a-z, ]+) \|", text, re.MULTILINE) for name in row.split(", ")}
    assert listed >= {*STATES, *PARTS}
    keys = re.findall(r'\[\["(.)"(?:, "(.)")?\]', (STATIC / "app.js").read_text())
    assert len(keys) >= 7
    assert not [key for pair in keys for key in pair if key and f"`{key}`" not in text]
