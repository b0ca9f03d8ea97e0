"""Tests of `meshwright plan schedule`: text, SVG and JSON show the timeline, without importing torch."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshwright.base.cli import main
from meshwright.base.topology.schedule_timeline import ActionCosts, build_timeline, compare_schedules
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.errors import ConfigError
from meshwright.planner.display.schedule_svg import write_svg
from meshwright.planner.display.schedule_text import show_schedule, show_schedules


def drawing(kind: str, width: int, color: bool = False, **size: int) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=color, highlight=False, color_system="256" if color else None
    )
    show_schedule(build_timeline(kind, **{"ranks": 4, "micro_batches": 8} | size), ActionCosts(), console)
    return stream.getvalue()


def test_row_shows_the_actions_of_a_rank_in_order():
    text = drawing("1f1b", 120)
    assert "\x1b" not in text
    assert "rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2---" in text
    assert "bubble 27.3% = 3/11 of 4 ranks x 33 slots; formula (P-1)/(M+P-1) = 3/11" in text
    assert "peak micro-batches in flight, by rank: 4 3 2 1" in text


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_drawing_has_every_action_once_and_fits_the_terminal(kind, width):
    rows = [line for line in drawing(kind, width).splitlines() if line.startswith("rank ")]
    assert max(map(len, rows)) <= width
    for rank, slots in enumerate(build_timeline(kind, 4, 8).rows):
        line = "".join(row.partition("  ")[2].ljust(3) for row in rows if row.startswith(f"rank {rank} "))
        assert re.sub(r"[^FBIW0-9]", "", line.upper()) == "".join(f"{s.action.op}{s.action.micro_batch}" for s in slots)


def test_color_marks_the_action():
    assert "\x1b[37;44mF0" in drawing("1f1b", 120, color=True)


def test_truncated_drawing_says_which_slots_are_missing():
    text = drawing("gpipe", 80, ranks=16, micro_batches=512)
    assert len(text.splitlines()) < 220
    assert "are not shown; try a smaller --micro, a wider terminal, or --svg FILE" in text


@pytest.mark.parametrize("kind", SCHEDULES)
def test_svg_has_every_action_and_no_external_resources(kind, tmp_path, capsys):
    path = tmp_path / "picture.svg"
    main(["plan", "schedule", kind, "--svg", str(path)])
    tree = ElementTree.parse(path)
    space = "{http://www.w3.org/2000/svg}"
    cells = [text.text for text in tree.iter(f"{space}text") if text.get("class", "").startswith("cell")]
    assert cells == [str(slot.action.micro_batch) for row in build_timeline(kind, 4, 8).rows for slot in row]
    assert not list(tree.iter(f"{space}script"))
    assert re.findall(r"https?://[^\"]*", path.read_text()) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in path.read_text()
    assert kind in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["picture.svg"]


def test_schedule_json_is_the_timeline(capsys):
    main(["plan", "schedule", "dualpipev", "--ranks", "2", "--micro", "4", "--json"])
    record = json.loads(capsys.readouterr().out)
    found = build_timeline("dualpipev", 2, 4)
    assert record["bubble"] == record["bubble_formula"] == float(found.bubble)
    assert record["peak_in_flight"] == found.rank_peaks
    assert [[cell["action"] for cell in row] for row in record["rows"]] == [
        [str(slot.action) for slot in row] for row in found.rows
    ]


def test_all_schedules_are_compared_and_errors_reported(capsys):
    main(["plan", "schedule", "--ranks", "4", "--micro", "6", "--json"])
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert [row["schedule"] for row in rows if "error" in row] == ["dualpipev"]
    main(["plan", "schedule", "--ranks", "4", "--micro", "6"])
    text = capsys.readouterr().out
    assert re.search(r"^1f1b +1 +33\.3% +27 +4 +1$", text, re.MULTILINE)
    assert "not available: schedule dualpipev" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["wave"], "unknown pipeline schedule 'wave'; expected one of gpipe"),
        (["gpipe", "--ranks", "257"], "too large; expected at most 256"),
        (["--micro", "0"], "0 micro-batches is empty"),
        (["gpipe", "--forward", "17"], "forward takes 17 slots; expected 1 to 16"),
        (["gpipe", "--svg", "/nowhere/picture.svg"], "cannot be written; expected a file in a folder that exists"),
        (["--svg", "picture.svg"], "--svg draws one schedule"),
        (["gpipe", "--ranks", "many"], "--ranks"),
    ],
)
def test_invalid_argument_is_reported_in_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "schedule", *args])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_plan_schedule_imports_no_torch(tmp_path):
    code = (
        "import sys; from meshwright.base.cli import main\n"
        "main(['plan', 'schedule'])\n"
        f"main(['plan', 'schedule', 'zbv', '--svg', {str(tmp_path / 'picture.svg')!r}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_table_in_the_docs_is_what_the_command_prints(capsys):
    main(["plan", "schedule", "--ranks", "4", "--micro", "8"])
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(SCHEDULES))]
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines()]
    record = [row for row in rows if row[0] in SCHEDULES and len(row) == 6]
    assert record == printed


def test_svg_is_written_only_to_a_regular_file(tmp_path):
    drawn = build_timeline("gpipe", 2, 2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_svg(drawn, ActionCosts(), tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "there.svg")
    write_svg(drawn, ActionCosts(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there.svg").read_text().startswith("<svg")


def test_comparison_is_readable_at_80_columns():
    stream = io.StringIO()
    console = Console(file=stream, width=80, highlight=False)
    show_schedules(compare_schedules(4, 8), console)
    text = stream.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^interleaved +2 +15\.8% +28\.5 +5\.5 +2\.5 *$", text, re.MULTILINE)
