"""Tests of the report as an HTML page, as Markdown and in a notebook, on the folder of a run that never ran."""

from __future__ import annotations

import json
import os
import re
import shutil
from html import unescape

import pytest

from meshwright.base.cli import main
from meshwright.base.config import fingerprint, identity, placement
from meshwright.base.io import format_bytes, format_seconds
from meshwright.insight.report.html_page import render_page
from meshwright.insight.report.markdown_page import render_markdown
from meshwright.insight.report.run_document import build_document
from meshwright.insight.report.run_report import build_report
from tests.insight.observe.parsed_page import Page
from tests.insight.observe.reported_run import BEGAN, KILLED_AT, PHASES, PROCESSOR, RESTORED, STEPS, WAITS, ReportedRun

NOW = BEGAN + 1000
SECTIONS = [
    "Explanation",
    "Predicted and measured",
    "Phases",
    "Timeline of a step",
    "Curves",
    "Goodput account",
    "Recovery",
    "Diagnosis",
    "Certificate",
    "Configuration",
    "Versions",
]
PARTS = ["Problem", "Mechanism", "Communication", "Tradeoff", "Measurement"]
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J`*|[x](http://evil)"


@pytest.fixture
def run(tmp_path, home):
    return ReportedRun(tmp_path, home)


def report(run):
    return build_report(run.folder)


def document(run):
    return build_document(report(run), NOW)


def page(run):
    return Page(render_page(document(run)))


def part(found, title):
    [explanation] = [section for section in found.sections if section.title == "Explanation"]
    return next(" ".join([*each.sentences, *each.items]) for each in explanation.parts if each.title == title)


def section(found, title):
    return next(each for each in found.sections if each.title == title)


def test_page_is_self_contained_and_has_no_script(run):
    content = render_page(document(run))
    found = Page(content)
    assert found.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "base", "form"})
    assert not re.search(r"https?:|//[a-z]|url\(|@import|javascript:", content)
    assert {
        name for name, _ in found.attributes if name.startswith("on") or name in ("src", "srcset", "style")
    } == set()
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert "default-src 'none'" in content


def test_page_has_every_section_in_order(run):
    signals, headings = page(run).headings[:3], page(run).headings[3:]
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS
    assert [heading for heading in headings if heading in PARTS] == PARTS
    assert signals == ["Progress", "Exposed communication", "Recovery"]


def test_explanation_has_the_figures_of_the_records(run):
    found = document(run)
    assert "76.1 k parameters are trained for 40 steps (adamw, fp32) on 2 ranks of made-up processor" in part(
        found, PARTS[0]
    )
    assert f"rank 0 has {format_bytes(12 << 20)} of model state" in part(found, "Problem")
    assert "a device has 3.73 GiB" in part(found, "Problem")  # of the machine in plan.json
    assert part(found, "Mechanism").startswith("Replicate 2: each replica processes 8 samples per step")
    exposed = PHASES["sync"] + sum(WAITS.values())
    assert f"takes {format_seconds(exposed)} of the 40 ms of a step (22%)" in part(found, "Communication")
    assert "sync 4 ms" in part(found, "Communication")
    assert found.headlines[1].figure == "22% of a step"  # the headline says the same
    assert "exposed communication 9 ms" in part(found, "Tradeoff")
    assert "number 1 of the planner's ranking" in part(found, "Tradeoff")
    assert "memory" in part(found, "Tradeoff").rpartition("Compared with it:")[2]
    assert f"Medians of {STEPS - RESTORED - 2} steps of attempt 2" in part(found, "Measurement")
    assert f"Step time: 40 ms, predicted {format_seconds(run.plan['seconds'])}" in part(found, "Measurement")
    [explanation] = [each for each in found.sections if each.title == "Explanation"]
    [table] = explanation.parts[2].tables
    rows = run.plan["communication_exact"]["0"]
    assert [row[:4] for row in table.rows] == [
        [row["axis"], row["collective"], f"{row['message_bytes']:,}", f"{row['wire_bytes']:,}"] for row in rows
    ]


def test_exposed_communication_of_profiled_steps_is_divided_by_axis(run, capsys):
    run.write_profile(20, 22, 2)
    waits = PHASES["sync"] + 0.002  # the spans have one wait of 2 ms
    sentence = f"in the mean of the 2 newest profiled steps: control {format_seconds(waits)}."
    assert sentence in part(document(run), "Communication")
    main(["report", str(run.folder.root), "--json"])
    exposed = json.loads(capsys.readouterr().out)["exposed"]
    assert exposed["by_axis"] == {"control": pytest.approx(waits)}
    assert exposed["by_phase"]["forward"] == pytest.approx(WAITS["forward"])
    assert sum(filter(None, exposed["by_phase"].values())) == pytest.approx(exposed["seconds"])
    (run.folder.root / "trace" / "rank-00000.steps-30-31.a0002.json.gz").write_bytes(b"no profile")
    assert "profiled" not in part(document(run), "Communication")


def test_explanation_names_the_schedule_of_a_pipeline(tmp_path, home):
    run = ReportedRun(tmp_path, home, "--layout.pipeline=2", "--batch.micro=2", "--model.layers=4")
    assert "schedule 1f1b" in part(document(run), "Mechanism")


def test_waits_inside_of_the_passes_are_reported_without_a_prediction(run):
    run.write_plan(phases={})
    row = build_report(run.folder).row("phases", "exposed inside them")
    assert (row.measured, row.predicted) == (pytest.approx(WAITS["forward"] + WAITS["backward"]), None)


def test_tradeoff_says_that_no_machine_was_measured(run):
    run.write_plan(cluster_file=None, cluster=None, seconds=None, low=None, high=None)
    found = document(run)
    assert "no machine was measured" in part(found, "Tradeoff")
    assert "sharded" in part(found, "Mechanism").lower()  # bytes are known without a machine
    assert "not predicted" in found.verdict


def test_phases_timeline_and_curves_show_the_records(run):
    found = document(run)
    [chart] = section(found, "Phases").bars
    assert [bar.label for bar in chart.bars] == ["rank 0", "rank 1"]
    assert [width for css, _, width, _ in chart.bars[0].segments if css == "orange"] == [pytest.approx(100.0)]
    [timeline] = section(found, "Timeline of a step").bars
    assert "rank 1, backward: 20 ms" in [label for *_, label in timeline.bars[1].segments]
    curves = section(found, "Curves").curves
    assert [curve.name for curve in curves] == ["loss", "gradient norm", "throughput"]
    assert (curves[0].low, curves[0].high, curves[0].last) == ("2.05", "4", "step 39")
    assert [label for _, label in curves[0].marks] == ["attempt 2"]
    assert "attempt 2 from step 16" in section(found, "Curves").notes[0]


def test_account_adds_up_to_the_wall_time(run):
    [table] = section(document(run), "Goodput account").tables
    assert sum(float(row[2].rstrip("%")) for row in table.rows) == pytest.approx(100, abs=0.3)
    assert "lost work" in [row[0] for row in table.rows]


def test_recovery_names_rank_step_phase_and_verdict(run):
    found = section(document(run), "Recovery")
    assert "2 attempts: 1 failed, 1 complete." in found.sentences
    assert f"at step {RESTORED}" in " ".join(found.sentences)
    attempts = found.tables[0]
    reason = f"rank 1 at step {KILLED_AT}, backward: rank 1 was killed by signal 9 (infrastructure)"
    assert attempts.rows[0][3:] == ["0 to 19", "failed", reason]
    assert attempts.marked_rows == [0]


def test_plan_for_another_machine_is_named_everywhere(run, capsys):
    run.write_plan(cluster="h100:2", device="h100")
    sentence = f"the prediction was made for another machine: for h100:2 (h100), and the run was on {PROCESSOR}"
    found = document(run)
    assert sentence[1:] in found.warnings[0]
    assert sentence[1:] in page(run).text
    assert sentence[1:] in render_markdown(found)
    assert sentence[1:] in unescape(report(run)._repr_html_())
    main(["report", str(run.folder.root)])
    assert sentence in " ".join(capsys.readouterr().out.split())
    main(["report", str(run.folder.root), "--json"])
    assert json.loads(capsys.readouterr().out)["other_machine"][0].startswith(sentence)


def test_plan_for_this_machine_has_no_warning(run):
    assert document(run).warnings == []


def write_certificate(run, **changes):
    values = {
        "meshwright": "0.2.0",
        "identity": fingerprint(identity(run.config)),
        "placement": fingerprint(placement(run.config)),
        "time": "2026-01-02T03:04:05Z",
        "passed": True,
        "checks": [{"check": "stream", "claim": "samples are unique", "passed": True, "measured": "40 steps"}],
        "not_proven": ["peak memory"],
    }
    (run.folder.root / "certificate.json").write_text(json.dumps(values | changes))


def certificate(run):
    return section(document(run), "Certificate")


def test_certificate_is_shown_with_what_it_proves(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "There is no certificate" in certificate(run).sentences[0]
    write_certificate(run)
    found = certificate(run)
    assert found.sentences[0].startswith("All claims hold: 1 of 1, proven 2026-01-02T03:04:05Z")
    assert found.sentences[1] == f"It is for the identity of this run, {fingerprint(identity(run.config))}."
    assert found.tables[0].rows == [["stream", "samples are unique", "holds", "40 steps"]]
    write_certificate(run, identity="0123")
    assert "It is of ANOTHER identity: 0123" in certificate(run).sentences[1]
    write_certificate(run, placement="0123")
    assert certificate(run).sentences[1].endswith(", with another placement.")
    write_certificate(run, checks=[{"claim": "x"}, 3, "y"], passed=True)
    assert certificate(run).sentences[0].startswith("NOT all claims hold: 0 of 3")


def test_configuration_lists_what_differs_from_the_preset(run):
    [table] = section(document(run), "Configuration").tables
    assert ["model.width", "32", "128", "identity"] in [list(row) for row in table.rows]
    assert "launch.device" in [row[0] for row in table.rows]


def all_texts(found):
    yield from (found.title, found.sentence, found.verdict, found.status, *found.warnings)
    for each in found.sections:
        yield from section_texts(each)


def section_texts(found):
    yield from (found.title, *found.sentences, *found.items, *found.notes)
    for table in found.tables:
        yield from (cell for row in table.rows for cell in row)
    for inner in found.parts:
        yield from section_texts(inner)


def test_markdown_has_the_figures_of_the_page(run):
    found = document(run)
    written, shown = unescape(render_markdown(found)).replace("\\", ""), page(run).text
    texts = [" ".join(text.split()) for text in all_texts(found)]
    assert [text for text in texts if text not in written] == []
    assert [text for text in texts if text not in shown] == []


def test_hostile_texts_are_escaped(tmp_path, home):
    run = ReportedRun(tmp_path, home, name="<b onclick=x>&`run")
    run.write_incident(1, outcome="failed", rank=1, step=3, message=HOSTILE, log_tail=[HOSTILE, "```"], verdict=HOSTILE)
    run.write_plan(notes=[HOSTILE], cluster=HOSTILE, device=HOSTILE)
    start = run.start() | {"layout": HOSTILE, "torch": HOSTILE, "batch": HOSTILE, "processor": HOSTILE}
    run.append("start", 0, attempt=3, **start)
    rows = [{"axis": HOSTILE, "collective": HOSTILE, "message_bytes": 1, "wire_bytes": 1}]
    memory = {"peak": {}, "at_peak": {HOSTILE: 3}, "peak_total": 5}
    run.append("counters", 0, attempt=3, step=1, communication=rows, memory=memory)
    run.append("save_failed", 0, attempt=3, step=1, message=HOSTILE)
    write_certificate(run, checks=[{"check": HOSTILE, "claim": HOSTILE, "measured": HOSTILE}], not_proven=[HOSTILE])
    content = render_page(document(run))
    assert "&lt;img src=x" in content
    assert Page(content).tags.isdisjoint({"img", "b", "script"})
    assert not any(name.startswith("on") for name, _ in Page(content).attributes)
    written = render_markdown(document(run))
    markdown = re.sub(r"(`{3,})\n.*?\n\1", "", written, flags=re.S)  # code is shown as it is
    assert len(markdown) < len(written)
    for written in (content, markdown, report(run)._repr_html_()):
        assert "<img" not in written
        assert "<b " not in written
        assert "\x1b" not in written
    assert "[x](http" not in markdown


@pytest.mark.parametrize("gone", ["plan.json", "run.toml", "trace", "attempts", "events"])
def test_report_of_an_incomplete_folder_has_what_there_is(run, gone):
    path = run.folder.root / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = document(run)
    assert Page(render_page(found)).headings[:3] == ["Progress", "Exposed communication", "Recovery"]
    assert render_markdown(found)
    if gone != "events":
        assert "40 ms" in found.verdict


def test_report_of_damaged_records_works(run):
    run.write_plan(cluster_file={"device": 3}, communication=[3, {"axis": []}], memory=[], phases="x", notes={})
    run.folder.run_file.write_text("steps = 'many'\n[layout]\ntensor = -1\n")
    for rank in range(2):
        with open(run.folder.root / "trace" / f"rank-{rank:05d}.spans.jsonl", "a") as file:
            for phases in ([3], [["forward"]], [["forward", "x"]], [["sleep", 1]] * 9000, {}, [["forward", 1e300]]):
                record = {
                    "kind": "step",
                    "attempt": 2,
                    "step": 39,
                    "begin": 1,
                    "end": 3,
                    "phases": phases,
                    "waits": [1],
                }
                file.write(json.dumps(record) + "\n")
            file.write("[[[[\n")
    assert page(run).headings
    (run.folder.root / "trace" / "rank-00000.spans.jsonl").unlink()
    os.mkfifo(run.folder.root / "trace" / "rank-00000.spans.jsonl")
    assert "Timeline of a step" not in page(run).headings


def test_report_of_a_running_attempt(run):
    run.append("attempt_start", -1, attempt=3, restart=2)
    run.append("start", 0, attempt=3, **run.start())
    found = document(run)
    assert "No step was timed" in part(found, "Measurement")
    assert Page(render_page(found))
