"""Tests of the view of a training run: header, live line and plain lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.config import RunConfig, load_config
from meshwright.base.io import format_bytes, format_clock
from meshwright.base.terminal.console import MIN_WIDTH, make_console
from meshwright.base.terminal.terminal import Terminal, live_line, phase_shares, plain_line, rates

PHASES = {"fetch": 0.01, "copy": 0.0, "forward": 0.3, "backward": 0.5, "sync": 0.15, "update": 0.04}


def step(number: int, **changes):
    return {
        "kind": "step",
        "attempt": 1,
        "rank": 0,
        "time": number + 1.0,
        "step": number,
        "loss": 2.5,
        "grad_norm": 1.25,
        "lr": 3e-3,
        "tokens": 2000,
        "samples": 16,
        "phases": PHASES,
        "seconds": 1.0,
        "memory": 3 << 30,
        **changes,
    }


START = {
    "kind": "start",
    "attempt": 1,
    "parameters": 1234567,
    "decoder": True,
    "layout": "replicate 2",
    "ranks": 2,
    "batch": "global 16 = micro 8 x data-parallel 2 x accumulation 1",
    "device": "cpu",
    "threads": 1,
    "precision": "fp32",
    "torch": "2.13.0",
    "sources": ["stdlib"],
    "samples": 1000,
    "held_out": 10,
    "epoch_steps": 62.5,
    "identity": "0123abcd",
    "placement": "4567cdef",
}
END = {"kind": "end", "attempt": 1, "steps": 300, "loss": 2.5, "skipped": 2, "parameters_digest": "ab" * 32}


def show(*events, config: RunConfig | None = None) -> str:
    stream = io.StringIO()
    terminal = Terminal(config or load_config(), Path("runs/x"), 1, stream)
    for event in events:
        terminal.show(event)
    terminal.close()
    return stream.getvalue()


def test_header_lists_settings_without_an_effect():
    note = "pipeline.schedule = zbv has no effect: layout.pipeline = 1"
    assert f"  note    {note}" in show({**START, "notes": [note]})


def test_run_without_a_terminal_prints_a_header_and_a_line_per_log_every_steps():
    evaluation = {"kind": "eval", "attempt": 1, "step": 20, "loss": 2.0, "tokens": 99}
    text = show(START, *(step(n) for n in range(21)), evaluation, END)
    assert "1,234,567 parameters: 4 layers, width 128" in text
    assert "global 16 = micro 8" in text
    assert "tokens per step" in text
    assert text.count("tokens/s") == 3
    assert "held-out loss 2.0000 over 99 tokens" in text
    assert "done: 300 steps, 2 skipped, loss 2.5000; parameters abababababababab" in text


def test_units_and_metrics_follow_the_data():
    start = START | {"unit": "samples", "decoder": False}
    evaluation = {"kind": "eval", "attempt": 1, "step": 0, "loss": 2.0, "tokens": 99, "metrics": {"accuracy": 0.75}}
    text = show(start, step(0, metrics={"accuracy": 0.5, "recall": None}), evaluation)
    assert "loss 2.5000  accuracy 0.5  recall non-finite  lr" in text
    assert "2,000 samples/s" in text
    assert "held-out loss 2.0000 over 99 samples  accuracy 0.75" in text
    assert "tokens" not in text
    assert "accuracy 0.5" in live_line([step(3, metrics={"accuracy": 0.5})], 10, 80, unit="samples").plain


def test_counter_is_a_number_of_completed_steps():
    assert "     1 of 300 steps done" in show(step(0))
    assert live_line([step(209)], 300, 80).plain.lstrip("━").startswith("  210/300 steps")


def test_events_of_another_attempt_are_not_shown():
    assert show(step(0, attempt=2)) == ""


@pytest.mark.parametrize("width", [40, 80, 100, 120, 140, 160, 200])
def test_live_line_drops_fields_to_fit_the_terminal_and_spells_out_the_rest(width):
    checkpoint = {"kind": "checkpoint", "step": 100, "time": 100.0}
    line = live_line([step(n) for n in range(150)], 300, width, checkpoint).plain
    assert len(line) <= width
    assert line.startswith("━" * 4)
    assert "…" not in line
    fields = ["150/300 steps", "loss 2.5000"]
    fields += ["eta 02:30"] if width >= 60 else []
    fields += ["2,000 tokens/s", "exposed comm 15%"] if width >= 80 else []
    fields += ["checkpoint 50 s old, 50 steps at risk"] if width >= 120 else []
    fields += ["grad norm 1.25"] if width >= 140 else []
    fields += ["forward 30%  backward 50%"] if width >= 160 else []
    fields += ["lr 3.0e-03", "memory 3 GiB", "data 1%"] if width >= 200 else []
    assert all(field in line for field in fields)


def test_non_finite_loss_is_reported():
    assert "loss non-finite" in plain_line([step(3, loss=None, grad_norm=None)], 10)
    event = {"kind": "nonfinite", "attempt": 1, "step": 3, "module": "model.0"}
    assert "step 3: non-finite values, first in model.0" in show(event)


def test_quarantined_sample_is_reported():
    event = {"kind": "bad_sample", "attempt": 1, "step": 3, "sample": 7, "source": "mine", "reason": "torn"}
    assert "sample 7 of mine is quarantined: torn" in show(event)


def test_recovery_posture_is_shown_with_every_line():
    checkpoint = {"kind": "checkpoint", "attempt": 1, "step": 100, "time": 100.0, "retention_error": ""}
    restored = {"kind": "restored", "attempt": 1, "step": 7, "checkpoint": "x", "seconds": 1.0, "changes": []}
    assert plain_line([step(3)], 10).endswith("no checkpoint, 4 steps at risk")
    assert plain_line([step(100)], 300, checkpoint).endswith("checkpoint 1 s old, 1 step at risk")
    assert plain_line([step(9)], 300, restored).endswith("  3 steps at risk")
    assert "checkpoint 1 s old" in show(checkpoint, step(100))


def test_exposed_communication_includes_waits_inside_other_phases():
    shares = phase_shares([step(3, waits={"forward": 0.1, "backward": 0.2})])
    assert shares["sync"] == pytest.approx(0.45)
    assert shares["forward"] == pytest.approx(0.2)
    assert shares["backward"] == pytest.approx(0.3)


def test_rates_exclude_the_first_step_and_slowed_steps():
    slowed = [step(3, seconds=9.0, counted=True), step(4, seconds=9.0, profiled=True)]
    assert rates([step(1), step(2), *slowed]) == (1.0, 2000.0)
    assert rates([step(0, seconds=60.0), step(1), step(2)]) == (1.0, 2000.0)
    assert rates([step(0, seconds=4.0)]) == (4.0, 500.0)


def test_phase_shares_add_up_to_one():
    assert sum(phase_shares([step(0), step(1)]).values()) == pytest.approx(1.0)


@pytest.mark.parametrize("columns", ["0", "1", "abc", "-3"])
@pytest.mark.parametrize("args", [["plan", "schedule", "1f1b"], ["plan", "schedule"]])
def test_invalid_columns_variable_does_not_end_in_a_traceback(columns, args):
    code = f"from meshwright.base.cli import main; main({args!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"COLUMNS": columns}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "1f1b" in done.stdout


def test_console_is_never_narrower_than_the_minimum(monkeypatch):
    for columns in ("0", "1", "abc", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert make_console(io.StringIO()).width >= MIN_WIDTH


def test_sizes_and_durations_are_readable():
    assert [format_bytes(n) for n in (5, 2048, 5 << 20, 3 << 30)] == ["5 B", "2 KiB", "5 MiB", "3 GiB"]
    assert [format_clock(s) for s in (5, 65, 3700)] == ["00:05", "01:05", "01:01:40"]
