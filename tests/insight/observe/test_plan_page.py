"""Tests of `meshwright plan MODEL`: terminal, JSON, HTML page and run file show the same plan."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from meshwright.base.cli import main
from meshwright.base.config import load_config
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.io import format_bytes, format_seconds
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.planner.display.plan_page import render_plan_page
from meshwright.planner.display.plan_text import bar, show_plan
from meshwright.planner.search.plan_result import make_plan
from meshwright.planner.workload.workload_args import build_workload


@pytest.fixture(scope="module")
def result():
    return make_plan(build_workload("llama-70b"), resolve_cluster("h100:8x16"), scaling=True)


@pytest.fixture(scope="module")
def pipelined():
    return make_plan(build_workload("llama-70b", ["--layout.pipeline=8"]), resolve_cluster("h100:8x16"))


def render(result, width: int = 120) -> str:
    stream = io.StringIO()
    show_plan(result, 3, explained=True, console=Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def test_terminal_shows_the_plan_its_figures_and_the_ladder(result):
    text = render(result, 200)
    assert "\x1b" not in text
    assert format_seconds(result.chosen.seconds) in text
    assert format_bytes(result.chosen.peak_memory.total) in text
    for step in result.ladder:
        assert step.bottleneck.message in text
    for part in ("Problem", "Mechanism", "Communication", "Tradeoff", "Measurement", "What breaks first at 10x?"):
        assert part in text
    assert "Amdahl" in text
    assert "critical batch (assumed)" in text


def test_terminal_says_why_the_first_plan_is_not_the_fastest(result):
    assert "Plan 1 is" not in render(result)
    slower_first = replace(result, listed=[result.listed[1], result.listed[0], *result.listed[2:]])
    assert "% slower than plan 2" in render(slower_first)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_plan_fits_the_terminal_without_ellipsis(result, width):
    text = render(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for label in ("bottleneck", "effect", "change", "later", "baseline", "setting changed", "candidates timed, memory"):
        assert label in text


def test_bar_fills_exactly_its_cells():
    parts = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    for cells in (10, 31, 100):
        assert len(bar(parts, 1.0, cells, {}).plain) == cells
        assert bar(parts, 2.0, cells, {}).plain.count("█") == pytest.approx(cells / 2, abs=1)
    assert len(bar({"a": 5.0}, 1.0, 20, {}).plain) == 20


class Tags(HTMLParser):
    """Checks that every tag is closed in order and that no attribute refers to another resource."""

    EMPTY = ("meta", "rect", "line", "path", "circle", "polyline", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        while self.open[-1] != tag and self.open[-1] in self.EMPTY:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_shows_the_same_plan(result, pipelined):
    for each in (result, pipelined):
        text = render_plan_page(each, 3)
        tags = Tags()
        tags.feed(text)
        assert not tags.open
        assert not tags.seen & {"script", "link", "img", "iframe"}
        assert "url(" not in text
        assert "http" not in text.replace("arXiv:", "")
        inside = " ".join(tags.text)
        for step in each.ladder:
            assert step.bottleneck.message in inside
        assert each.explanation.problem[0] in inside
        assert len(text) < 600_000
    assert "Pipeline schedule" in render_plan_page(pipelined, 3)
    assert "prefers-color-scheme: dark" in render_plan_page(result, 3)


def test_untrusted_text_is_escaped_on_the_page_and_harmless_on_the_terminal(result):
    untrusted = '<script>alert(1)</script>\x1b[31m&"'
    model = replace(result.workload.model, name=untrusted)
    named = replace(result, workload=replace(result.workload, model=model, notes=(untrusted,)))
    text = render_plan_page(named, 3)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "\x1b" not in render(named)


def test_plan_json_is_one_document_and_out_writes_its_plan(tmp_path, capsys):
    out = tmp_path / "plan.toml"
    main(["plan", "llama-8b", "--cluster", "h100:8x2", "--json", "--out", str(out), "--top", "3"])
    record = json.loads(capsys.readouterr().out)
    beside = json.loads(out.with_suffix(".json").read_text())
    assert beside == record["plan"]
    layout, batch = validate(load_config(out))
    assert layout.ranks == 16
    planned = record["plan"]["plan"]["layout"]
    assert layout == Layout(**{axis: planned[axis] for axis in planned if axis != "sharding"})
    assert batch.micro == record["plan"]["plan"]["batch"]["micro"]
    assert load_config(out).precision.compute == "bf16"


def test_explain_k_explains_and_writes_the_kth_plan(tmp_path, capsys):
    out = tmp_path / "second.toml"
    main(["plan", "llama-8b", "--cluster", "h100:8x2", "--json", "--explain", "2", "--out", str(out)])
    record = json.loads(capsys.readouterr().out)
    assert record["position"] == 2
    assert record["plan"] == record["ranked"][1]
    assert f"meshwright train {out} --steps 20" in record["explanation"]["measurement"][0]


def test_batch_sequence_and_precision_reach_the_run_file(tmp_path, capsys):
    out = tmp_path / "plan.toml"
    args = ["--batch", "64", "--sequence", "4096", "--precision", "fp16", "--optimizer.lr=1e-4", "--ranks", "4"]
    main(["plan", "llama-1b", "--cluster", "h100:8", *args, "--out", str(out)])
    config = load_config(out)
    assert (config.batch.global_, config.data.sequence, config.precision.compute) == (64, 4096, "fp16")
    assert config.optimizer.lr == 1e-4
    assert Layout.from_config(config.layout).ranks == 4


def test_plan_accepts_a_run_file_as_the_model(tmp_path, capsys):
    run = tmp_path / "mine.toml"
    run.write_text('preset = "llama-1b"\n[batch]\nglobal = 96\n')
    main(["plan", str(run), "--cluster", "h100:4", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["model"]["name"] == "mine"
    assert record["plan"]["plan"]["batch"]["global"] == 96


def test_precision_that_cannot_be_trained_is_planned_but_not_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "llama-8b", "--cluster", "h100:8", "--precision", "fp8", "--out", str(tmp_path / "p.toml")])
    assert ended.value.code == 2
    assert "fp8 can be planned but not trained" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["llama-8b", "--cluster", "q100"],
        ["llama-8b", "--cluster", "h100:0"],
        ["llama-8b", "--precision", "int4"],
        ["llama-8b", "--ranks", "9"],
        ["llama-8b", "--ranks", "0"],
        ["llama-8b", "--batch", "-1"],
        ["llama-8b", "--top", "0"],
        ["llama-8b", "--explain", "9999"],
        ["llama-8b", "--explain", "1", "2"],
        ["llama-8b", "--critical-batch", "-1"],
        ["llama-8b", "--out", "plan.txt"],
        ["llama-8b", "--html", "/no/such/folder/page.html"],
        ["llama-8b", "--layout.tensor=3"],
        ["llama-8b", "--layout.tensor=x"],
        ["llama-8b", "--pipeline.schedule=none"],
        ["llama-405b", "--cluster", "h100:8"],
        [],
    ],
)
def test_invalid_argument_is_one_line_and_exit_code_2(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("meshwright: ")
    assert error.count("\n") == 1


def test_plan_schedule_takes_precedence_over_plan(capsys):
    main(["plan", "schedule", "1f1b", "--json"])
    assert json.loads(capsys.readouterr().out)["schedule"] == "1f1b"


def test_plan_imports_no_torch(tmp_path):
    args = ["plan", "llama-8b", "--explain", "--scale", "--html", str(tmp_path / "p.html")]
    code = f"import sys; from meshwright.base.cli import main; main({args!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert re.search(r"^written: .*p\.html$", done.stdout, re.MULTILINE)


@pytest.mark.long
def test_written_plan_can_be_trained(tmp_path, capsys):
    out = tmp_path / "plan.toml"
    args = ["--model.layers=1", "--data.sequence=32", "--checkpoint.mode=off", "--launch.device=cpu"]
    main(["plan", "tiny", "--cluster", "h100:2", "--out", str(out), *args])
    main(["train", str(out), "--steps", "1", "--run", str(tmp_path / "run")])
    assert "done: 1 steps" in capsys.readouterr().out
