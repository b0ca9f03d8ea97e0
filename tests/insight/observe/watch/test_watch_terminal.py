"""Tests of `meshwright watch` in the terminal: signals, account, ranks and incidents, and no control characters."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import sys
import time

import pytest
from rich.console import Console

from meshwright.base.cli import main
from meshwright.insight.watch.terminal_view import rank_snapshots, sparkline, watch_in_terminal
from tests.kit.recorded_history import PHASES, RecordedRun


@pytest.fixture
def run(tmp_path):
    run = RecordedRun(tmp_path / "run")
    run.start()
    for step in range(20):
        run.step(step, own={1: {"forward": 0.13}})
        if step == 9:
            run.save(10)
    return run


def view(run, width=160):
    stream = io.StringIO()
    watch_in_terminal([run.history()], once=True, console=Console(file=stream, width=width))
    return stream.getvalue()


def test_view_shows_signals_account_ranks_checkpoints_and_incidents(run):
    run.write("straggler", -1, rank=1, step=19, phase="forward", factor=2.2, seconds=0.1, message="rank 1 is slow")
    run.end("failed", rank=1, step=20, phase="forward", message="killed by signal 9 (SIGKILL)")
    text = view(run)
    lines = text.splitlines()
    assert lines[0].endswith("attempt 1  failed")
    assert "rank 1 at step 20, forward: killed by signal 9 (SIGKILL)" in lines[1]
    assert lines[2].startswith(
        "progress      20 of 100 steps done  5 steps/s  goodput 22.9 samples/s  now 80 samples/s"
    )
    assert lines[3] == "communication exposed 115 ms per step, 57% of the step time (host waits)"
    assert lines[4].startswith("recovery      checkpoint after 10 steps, ")
    assert "10 steps (2 s) at risk  0 restarts" in lines[4]
    assert "straggler 14%" in text
    assert "lost work 29%" in text
    ranks = [line.split()[0] for line in lines[lines.index(next(x for x in lines if x.startswith("rank"))) :][1:3]]
    assert ranks == ["1", "0"]  # the slowest first
    assert "step-00000010.a0001 published" in text
    assert "incidents     attempt 1 failed: killed by signal 9 (SIGKILL)" in text
    assert "rank 1 is slow" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_view_fits_the_terminal(run, width):
    lines = view(run, width).splitlines()
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert any(line.startswith("rank  at step") and line.endswith("local time  exposed") for line in lines)
        assert "samples/s" in "".join(lines)
        assert "0 restarts" in "".join(lines)


def test_waits_inside_of_phases_are_exposed_and_not_local(tmp_path):
    run = RecordedRun(tmp_path / "run", ranks=1)
    run.start()
    phases, waits = PHASES, {"forward": 0.01, "backward": 0.02}
    communication = {"exposed_seconds": PHASES["sync"] + 0.03, "exposed_source": "host waits"}
    for step in range(4):
        seconds = sum(phases.values())
        run.write("step", step=step, seconds=seconds, phases=phases, waits=waits, communication=communication)
    [rank] = rank_snapshots(run.history())
    assert rank.local["forward"] == pytest.approx(PHASES["forward"] - 0.01)
    assert rank.exposed == pytest.approx(PHASES["sync"] + 0.03)
    assert rank.local_seconds + rank.exposed == pytest.approx(sum(PHASES.values()))


def test_bar_of_the_account_is_shown_in_colors_only(run):
    stream = io.StringIO()
    colored = Console(file=stream, width=80, force_terminal=True, color_system="standard")
    watch_in_terminal([run.history()], once=True, console=colored)
    assert "█" * 20 in stream.getvalue()
    assert "█" * 20 not in view(run, 80)


def test_control_characters_of_a_record_do_not_reach_the_terminal(run):
    run.write("save_failed", step=3, message="\x1b[2J\x07gone")
    run.folder.log(1, 0).write_text("\x1b]0;title\x07 printed\n")
    run.end("failed", message="\x1b[31mred")
    text = view(run)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "printed" in text


def test_watch_prints_one_snapshot_without_a_terminal_and_json_on_request(run, capsys):
    main(["watch", str(run.root), "--no-page"])
    assert "steps done" in capsys.readouterr().out
    main(["watch", str(run.root), str(run.root), "--json"])
    states = json.loads(capsys.readouterr().out)["runs"]
    assert [state["signals"]["progress"]["done"] for state in states] == [20, 20]
    assert sum(states[0]["goodput"]["parts"].values()) == pytest.approx(states[0]["goodput"]["wall_seconds"])


def test_view_is_refreshed_on_a_terminal_and_ctrl_c_ends_it_quietly(run):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "meshwright", "watch", str(run.root), "--no-page"])
    shown, deadline = b"", time.monotonic() + 60
    while shown.count(b"steps done") < 4 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16)
    os.kill(pid, signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal is closed
        while shown_after := os.read(terminal, 1 << 16):
            shown += shown_after
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shown.count(b"steps done") >= 4
    assert b"Traceback" not in shown


def test_a_folder_that_is_no_run_is_reported_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_code:
        main(["watch", str(tmp_path)])
    assert exit_code.value.code == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_sparkline_spans_the_values():
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▁▁"
