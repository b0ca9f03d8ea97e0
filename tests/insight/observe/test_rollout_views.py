"""Tests of what people look at in a run of reinforcement learning: terminal, page, report, account and commands."""

from __future__ import annotations

import io
import json
import re

import pytest

from meshwright.base.cli import main
from meshwright.base.config import load_config
from meshwright.base.history.rollout_table import MAX_BEGUN, RolloutHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.terminal.terminal import Terminal
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.report.run_report import build_report
from meshwright.insight.watch.page.curves import describe_curves
from meshwright.insight.watch.page.run_state import describe_run
from tests.kit.written_rollouts import RL, WrittenRollouts, write_restarted_run

START = {
    "kind": "start",
    "attempt": 1,
    "parameters": 1234,
    "decoder": True,
    "layout": "replicate 2",
    "ranks": 2,
    "batch": "global 4 = micro 1 x data-parallel 2 x accumulation 2",
    "device": "cpu",
    "threads": 1,
    "precision": "fp32",
    "torch": "2.13.0",
    "sources": ["strings, level 1"],
    "samples": 1000,
    "held_out": 10,
    "epoch_steps": 247.5,
    "identity": "0123abcd",
    "placement": "4567cdef",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> WrittenRollouts:
    return write_restarted_run(tmp_path_factory.mktemp("views") / "run")


def test_data_show_fits_80_columns_and_shows_the_account(run, capsys):
    main(["data", "show", str(run.folder.root), "--step", "0"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "0.1@1.0  rank 0 row 1    reward 0.75" in text
    assert "left out, no_signal: 1 group" in text
    assert re.search(r"generated +10 +25\n +=? ?trained +4 +10", text.replace("  = ", "    "))


def test_account_adds_up_in_every_view(run, capsys):
    main(["data", "show", str(run.folder.root), "--step", "4", "--json"])
    counts = json.loads(capsys.readouterr().out)["counts"]
    for index in (0, 1):
        parts = [counts["trained"], counts["in_flight"], *counts["dropped"].values()]
        assert counts["generated"][index] == sum(part[index] for part in parts)
    assert describe_run(RunHistory(run.folder), run.now)["rollouts"]["counts"] == counts


def test_data_find_says_where_a_rollout_was_trained_and_why_not(run, capsys):
    main(["data", "find", str(run.folder.root), "--rollout", "3.1@1.0"])
    found = capsys.readouterr().out
    assert "trained at step 0 of attempt 1" in found
    assert "lineage: timelines 1 to step 2, 2" in found
    main(["data", "find", str(run.folder.root), "--rollout", "2"])
    found = capsys.readouterr().out
    assert "not trained, failed" in found
    assert "the reward raised ValueError: no" in found
    assert max(map(len, found.splitlines())) <= 80


def test_data_find_lists_the_groups_of_a_prompt(run, capsys):
    main(["data", "find", str(run.folder.root), "--sample", str(run.prompt_id(3)), "--json"])
    assert json.loads(capsys.readouterr().out)["occurrences"][0] == {"epoch": 0, "group": 3}


@pytest.mark.parametrize("args", [[], ["--sample", "1", "--rollout", "1"]])
def test_data_find_takes_a_sample_or_a_rollout(run, capsys, args):
    with pytest.raises(SystemExit) as ended:
        main(["data", "find", str(run.folder.root), *args])
    assert ended.value.code == 2
    assert "one of --sample and --rollout" in capsys.readouterr().err


def test_terminal_line_is_short_and_has_what_matters(run):
    config = load_config(overrides=[*RL, "--batch.global=4", "--log_every=1"], ranks=2, steps=5)
    stream = io.StringIO()
    terminal = Terminal(config, run.folder.root, 1, stream)
    events = [json.loads(line) for line in run.folder.events(0).read_text().splitlines()]
    for event in [START, *(event for event in events if event["kind"] == "rollouts" or event["kind"] == "step")]:
        shown = {"lr": 1e-3, "grad_norm": 1.0, "memory": 1 << 20, **event}
        terminal.show(shown)
    header, _, lines = stream.getvalue().partition("     1 of 5 steps done")
    assert "1,000 prompts, 10 held out" in header
    assert "grpo, task strings, level 1, the reward of the task: 2 groups x 2 rollouts per step" in header
    assert "staleness up to 0 (synchronous), 1 generator" in header
    assert "samples" not in header
    first = lines.splitlines()[0]
    assert "reward 0.5  kl 0.01  entropy 2  stale 0  queue 0  generators idle 0%  learner waits 75%" in first
    assert "mismatch" not in lines
    assert "reward_std" not in lines


def record_late(events):
    """The events in the order of a device whose steps are recorded one step late."""
    begun = [event for event in events if event["kind"] == "rollouts"]
    steps = [event for event in events if event["kind"] == "step"]
    pairs = zip(begun[1 : len(steps)], steps[:-1], strict=True)
    return [begun[0], *(event for pair in pairs for event in pair), steps[-1]]


def written_steps(count):
    for step in range(count):
        yield {"kind": "rollouts", "step": step, "attempt": 1, "wait_seconds": step / 100}
        yield {"kind": "step", "step": step, "attempt": 1, "seconds": 1.0, "metrics": {"reward": step / 10}}


def test_steps_that_are_recorded_after_the_next_has_begun_have_their_rows():
    history = RolloutHistory()
    for event in record_late(list(written_steps(10))):
        (history.receive_step if event["kind"] == "step" else history.receive)(event)
    assert history.table.step.tolist() == list(range(10))
    assert history.table.column("wait_seconds").tolist() == [step / 100 for step in range(10)]
    assert history.table.column("reward").tolist() == [step / 10 for step in range(10)]


def test_only_the_newest_steps_that_have_begun_are_kept():
    history = RolloutHistory()
    events = list(written_steps(MAX_BEGUN + 1))
    for event in events[::2]:
        history.receive(event)
    for event in events[1::2]:
        history.receive_step(event)
    assert history.table.step.tolist() == list(range(1, MAX_BEGUN + 1))


def test_terminal_line_has_the_rollouts_of_a_step_that_is_recorded_late(run):
    config = load_config(overrides=[*RL, "--batch.global=4", "--log_every=1"], ranks=2, steps=5)
    stream = io.StringIO()
    terminal = Terminal(config, run.folder.root, 1, stream)
    events = [json.loads(line) for line in run.folder.events(0).read_text().splitlines()]
    shown = [event for event in events if event["attempt"] == 1]
    for event in record_late(shown):
        terminal.show({"lr": 1e-3, "grad_norm": 1.0, "memory": 1 << 20, **event})
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1
    assert all("learner waits 75%" in line for line in lines)


def test_page_has_curves_and_account_of_rollouts_only(run, tmp_path):
    history = RunHistory(run.folder)
    curves = describe_curves(history, 100, None, None)["rollouts"]
    assert curves["step"] == [0, 1, 2, 3, 4]
    assert curves["reward"]["mean"] == [0.5, 0.51, 0.52, 0.53, 0.54]
    zoomed = describe_curves(history, 100, 1, 3)["rollouts"]
    assert zoomed["step"] == [1, 2]
    assert describe_curves(history, 100, 90, 99)["rollouts"]["reward"] is None
    described = describe_run(history, run.now)["rollouts"]
    assert (described["staleness_bound"], described["max_staleness"], described["learner_idle"]) == (
        1,
        1,
        pytest.approx(0.75),
    )
    (tmp_path / "run.toml").write_text("steps = 3\n")
    other = RunHistory(type(run.folder)(tmp_path))
    assert describe_run(other, run.now)["rollouts"] is None
    assert describe_curves(other, 100, None, None)["rollouts"] is None


def test_report_has_a_section_of_rollouts(run, tmp_path):
    page, text = build_report(run.folder).to_html(), build_report(run.folder).to_markdown()
    for shown in (page, text):
        assert "generated = trained + dropped + in flight" in shown
        assert "dropped, lost_timeline" in shown
    assert "The learner waited for rollouts in 75.0% of the step time" in text


def test_diagnosis_names_the_learner_that_waits(tmp_path):
    run = WrittenRollouts(tmp_path / "run")
    run.begin()
    for _ in range(10):
        run.generate(2)
        run.step()
    run.close()
    findings = diagnose_run(RunHistory(run.folder))
    (found,) = [finding for finding in findings if finding.cause == "rollouts"]
    assert found.variant == "learner waits"
    assert found.change.settings == ("rl.generators = 2",)
    assert not [finding for finding in findings if finding.cause == "data"]


def test_records_that_no_run_writes_do_not_break_the_history():
    history = RolloutHistory()
    for event in ({"kind": "rollouts"}, {"kind": "rollouts", "step": 0, "attempt": 1, "counts": 3, "staleness": "x"}):
        history.receive(event)
        history.receive_step({"step": 0, "attempt": 1, "seconds": "x", "metrics": [1]})
    history.receive({"kind": "rollout_problem", "message": 3})
    assert history.counts is None
    assert len(history.table) == 1
    assert history.table.learner_idle_share is None
    assert history.table.generator_idle_share is None


def test_rows_are_bounded():
    history = RolloutHistory(max_rows=100)
    for step in range(1000):
        history.receive({"kind": "rollouts", "step": step, "attempt": 1})
        history.receive_step({"step": step, "attempt": 1, "seconds": 1.0, "metrics": {"reward": 1.0}})
    assert len(history.table) <= 100
    assert history.table.step[-1] == 999
    assert history.table.step[0] == 0
