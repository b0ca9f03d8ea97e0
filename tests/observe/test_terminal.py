"""What the terminal shows is in the events, fits its line, and says what is not finite."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from meshwright.config import RunConfig, load_config
from meshwright.io import format_bytes, format_clock
from meshwright.observe.terminal import Terminal, live_line, phase_shares, plain_line, rates

PHASES = {"fetch": 0.01, "copy": 0.0, "forward": 0.3, "backward": 0.5, "sync": 0.15, "update": 0.04}


def step(number: int, **changes):
    return {
        "kind": "step",
        "attempt": 1,
        "rank": 0,
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
    "torch": "2.13.0",
    "sources": ["stdlib"],
    "samples": 1000,
    "held_out": 10,
    "epoch_steps": 62.5,
}
END = {"kind": "end", "attempt": 1, "steps": 300, "loss": 2.5, "skipped": 2, "parameters_digest": "ab" * 32}


def shown(*events, config: RunConfig | None = None) -> str:
    stream = io.StringIO()
    terminal = Terminal(config or load_config(), Path("runs/x"), 1, stream)
    for event in events:
        terminal.show(event)
    terminal.close()
    return stream.getvalue()


def test_a_plain_run_tells_what_it_is_and_a_line_a_log_step():
    text = shown(
        START, *(step(n) for n in range(21)), {"kind": "eval", "attempt": 1, "step": 20, "loss": 2.0, "tokens": 99}, END
    )
    assert "1,234,567 parameters: 4 layers x 128 wide" in text
    assert "global 16 = micro 8" in text
    assert text.count("tok/s") == 3
    assert "held-out loss 2.0000 over 99 tokens" in text
    assert "done: 300 steps, 2 skipped, loss 2.5000; parameters abababababababab" in text


def test_events_of_another_attempt_are_not_shown():
    assert shown(step(0, attempt=2)) == ""


@pytest.mark.parametrize("width", [80, 100, 140, 160, 200])
def test_the_live_line_fits_any_terminal_with_all_that_matters(width):
    line = live_line([step(n) for n in range(150)], 300, width).plain
    assert len(line) < width
    narrow = (
        "150/300 done",
        "loss 2.5000",
        "lr 3e-03",
        "g 1.25",
        "2.0k tok/s",
        "f30%",
        "b50%",
        "x15%",
        "3GiB",
        "02:30",
    )
    wide = (
        "150 of 300 steps done",
        "loss 2.5000",
        "lr 3.0e-03",
        "norm 1.25",
        "2,000 tok/s",
        "fwd 30%",
        "exposed 15%",
        "mem 3 GiB",
        "eta 02:30",
    )
    assert all(word in line for word in (wide if width >= 140 else narrow))
    assert line.startswith("━" * 4)


def test_a_loss_that_is_not_finite_is_said():
    assert "loss not finite" in plain_line([step(3, loss=None, grad_norm=None)], 10)
    assert "not finite, first in model.0" in shown({"kind": "nonfinite", "attempt": 1, "step": 3, "module": "model.0"})


def test_a_quarantined_sample_is_said():
    event = {"kind": "bad_sample", "attempt": 1, "step": 3, "sample": 7, "source": "mine", "reason": "torn"}
    assert "quarantined sample 7 of mine: torn" in shown(event)


def test_rates_leave_the_first_step_out():
    assert rates([step(0, seconds=60.0), step(1), step(2)]) == (1.0, 2000.0)
    assert rates([step(0, seconds=4.0)]) == (4.0, 500.0)


def test_shares_add_up():
    assert sum(phase_shares([step(0), step(1)]).values()) == pytest.approx(1.0)


def test_sizes_and_times_read_well():
    assert [format_bytes(n) for n in (5, 2048, 5 << 20, 3 << 30)] == ["5 B", "2 KiB", "5 MiB", "3 GiB"]
    assert [format_clock(s) for s in (5, 65, 3700)] == ["00:05", "01:05", "01:01:40"]
