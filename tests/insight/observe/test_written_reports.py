"""Tests of where `meshwright report --html` and `--markdown` write, and of what a notebook shows of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.base.cli import main
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.api import Result
from meshwright.insight.report.run_report import build_report
from tests.insight.observe.parsed_page import Page
from tests.insight.observe.reported_run import STEPS, ReportedRun


@pytest.fixture
def run(tmp_path, home):
    return ReportedRun(tmp_path, home)


def test_files_are_written_into_the_run_folder_by_default(run, tmp_path, capsys):
    main(["report", str(run.folder.root), "--html", "--markdown", str(tmp_path / "here.md")])
    assert capsys.readouterr().out.count("written: ") == 2
    assert (run.folder.root / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "here.md").read_text().startswith("# Run run\n")
    run.folder.require_own_files()
    main(["report", str(run.folder.root), "--html", "--json"])
    assert json.loads(capsys.readouterr().out)["signals"]["progress"]["done"] == STEPS


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--html", "a", "b"], "--html names 2 files; expected --html FILE, or --html alone"),
        (["--html", "missing/a.html"], "--html missing/a.html cannot be written; expected a file in a folder that"),
        (["--html", "a", "--markdown", "a"], "a is also written by --html; expected a different name"),
    ],
)
def test_file_that_cannot_be_written_is_one_line(run, args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run.folder.root), *args])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_link_in_a_foreign_run_folder_is_not_followed(run, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run.folder.root / "report.html").symlink_to(victim)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run.folder.root), "--html"])
    assert ended.value.code == 2
    assert "report.html is a symbolic link; expected a regular file" in capsys.readouterr().err
    assert victim.read_text() == "mine"


def test_report_files_may_be_in_a_new_run_folder(tmp_path):
    for name in ("report.html", "report.md", "certificate.json"):
        (tmp_path / name).write_text("")
    RunFolder(tmp_path).require_usable()


def test_run_shows_itself_in_a_notebook(run):
    result = Result(run.folder.root, STEPS, 2.0, 0, "0", [])
    for shown in (result._repr_html_(), build_report(run.folder)._repr_html_()):
        found = Page(shown)
        assert found.tags.isdisjoint({"html", "body", "script", "link", "img"})
        assert found.headings == ["Progress", "Exposed communication", "Recovery", "Curves", "Goodput account"]
        assert "Step time 40 ms" in found.text
        assert "polyline" in found.tags
        style = shown.partition("<style>")[2].partition("</style>")[0]
        rules = re.sub(r"@media[^{]*|/\*.*?\*/", "", style)
        selectors = [rule.rpartition("{")[0].strip("{} \n") for rule in rules.split("}") if "{" in rule]
        assert all(selector.strip("{ \n").startswith(".meshwright-run") for selector in selectors)
    assert "folder=" in repr(result)


def test_result_of_a_deleted_run_has_no_html(tmp_path):
    assert Result(Path(tmp_path / "gone"), 1, 2.0, 0, "0", [])._repr_html_() is None
