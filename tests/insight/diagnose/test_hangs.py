"""The class hang: the rank that the others wait for, its line, and ranks that enter different collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.history.signals import read_signals
from meshwright.base.records.incidents import Incident, assign_verdict
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run import crashes, hangs
from meshwright.insight.diagnose.run.diagnose import diagnose_run, order_findings
from tests.insight.diagnose.recorded_run import RecordedRun, noisy


@pytest.fixture
def run(tmp_path):
    return RecordedRun(tmp_path)


def rank_rows(*locations: tuple[str, int]) -> list[dict]:
    return [{"rank": rank, "location": text, "collectives": count} for rank, (text, count) in enumerate(locations)]


def test_hang_names_the_rank_and_those_that_wait_for_it(run):
    run.begin(ranks=3)
    run.steps(0, noisy(6))
    ranks = rank_rows(
        ("step 6, sync, waiting in step control vector", 24),
        ("step 6, sync, waiting in step control vector", 24),
        ("step 6, fetch", 23),
    )
    run.end("hang", rank=2, step=6, phase="fetch", message="rank 2 has made no progress for 5.1 s", ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank, finding.step, finding.phase) == ("no progress", 2, 6, "fetch")
    assert finding.sentence.endswith("ranks 0, 1 wait in step control vector")
    assert list(crashes.find(run.history())) == []


def test_hang_that_the_run_has_survived_is_ordered_by_the_time_that_it_cost(run):
    run.begin()
    run.steps(0, noisy(10))
    run.time += 7.0
    run.end("hang", rank=1, step=10, phase="fetch", message="rank 1 has made no progress for 7.0 s")
    run.time += 1.0
    run.begin(step=8)
    run.steps(8, noisy(118))
    run.end()
    (finding,) = hangs.find(run.history())
    assert finding.survived
    assert finding.share == pytest.approx((7 + 1 + 0.2) / (1 + 7 + 1 + 11.8))
    slower = Finding("data", "loader", "", 0.5, "high")
    assert order_findings([finding, slower]) == [slower, finding]


FAULTHANDLER = """Thread 0x00007f10d61896c0 (most recent call first):
  File "/site/meshwright/core/trainer/signals.py", line 49 in _listen
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Current thread 0x00007f110849eb80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
%s  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl
  File "/site/meshwright/core/trainer/step.py", line 170 in run
  File "/site/meshwright/core/trainer/loop.py", line 60 in train_rank
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
  File "/home/me/train.py", line 10 in <module>
"""
PY_SPY = """Process 123: python train.py
Python v3.11.7

Thread 123 (idle): "MainThread"
    wait (threading.py:331)
%s    _call_impl (torch/nn/modules/module.py:1789)
    train_rank (meshwright/core/trainer/loop.py:60)
    <module> (train.py:10)
Thread 124 (idle): "Thread-1"
    other (mine.py:3)
"""


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (
            FAULTHANDLER
            % '  File "/home/me/model.py", line 22 in lookup\n  File "/home/me/model.py", line 18 in forward\n',
            "lookup (/home/me/model.py, line 22), blocked in wait (/usr/lib/python3.11/threading.py, line 331)",
        ),
        (FAULTHANDLER % "", "wait (/usr/lib/python3.11/threading.py, line 331)"),
        (PY_SPY % "    lookup (model.py:22)\n", "lookup (model.py, line 22), blocked in wait (threading.py, line 331)"),
        (PY_SPY % "", "wait (threading.py, line 331)"),
        ("", "attempts/0001/rank-00001.log"),
    ],
)
def test_stack_of_a_hang_ends_in_the_users_own_code(run, stack, place):
    """The script that has started the job is on the stack of a rank as well, and is not where it hangs."""
    run.begin()
    run.steps(0, noisy(6))
    run.end("hang", rank=1, step=6, phase="forward", message="rank 1 has made no progress for 5.1 s", stack=stack)
    (finding,) = hangs.find(run.history())
    assert finding.change.action.startswith("see where rank 1 is: ")
    assert finding.change.action.endswith(place)


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/u/meshwright/rl/mine.py", True),
        ("/data/lib/python3/code.py", True),
        ("/site/meshwright/callbacks.py", False),
        ("/usr/lib64/python3.11/threading.py", False),
        ("/root/.pyenv/versions/3.11/lib/python3.11/queue.py", False),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", False),
    ],
)
def test_own_code_is_told_from_libraries_by_its_folder(file, is_own):
    place = hangs.blocked_place(FAULTHANDLER % f'  File "{file}", line 3 in mine\n')
    assert place.startswith(f"mine ({file}, line 3), blocked in ") == is_own


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("code/train.py", True),
        ("types/model.py", True),
        ("select/model.py", True),
        ("multiprocessing/process.py", False),
        ("queue.py", False),
        ("meshwright/callbacks.py", False),
    ],
)
def test_own_code_is_told_from_libraries_where_py_spy_has_cut_the_folder_off(file, is_own):
    place = hangs.blocked_place(PY_SPY % f"    mine ({file}:3)\n")
    assert place.startswith(f"mine ({file}, line 3), blocked in ") == is_own


def test_run_that_waits_for_a_rank_now_is_a_hang_in_progress(run, monkeypatch):
    run.begin()
    run.steps(0, noisy(6))
    history = run.history()
    monkeypatch.setattr(type(history), "is_alive", True)
    signals = read_signals(history, run.time + 100)
    waiting = replace(signals, state="waiting", sentence="the ranks wait for rank 1", rank=1)
    monkeypatch.setattr(hangs, "read_signals", lambda _history, _now: waiting)
    (finding,) = hangs.find(history)
    assert (finding.variant, finding.rank, finding.share) == ("in progress", 1, 1.0)
    monkeypatch.setattr(hangs, "read_signals", lambda _history, _now: replace(signals, state="progressing"))
    assert list(hangs.find(history)) == []


def test_ranks_in_different_collectives_are_a_hang_even_if_the_backend_fails(run):
    run.begin(ranks=3)
    run.steps(0, noisy(9))
    ranks = rank_rows(
        ("step 9, sync, waiting in step control vector", 36),
        ("step 9, fetch, waiting in my all-reduce", 36),
        ("step 9, sync, waiting in step control vector", 36),
    )
    run.end("failed", rank=1, step=9, error_type="Killed", message="rank 1 was killed by signal 6", ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank, finding.step) == ("different collectives", 1, 9)
    assert "rank 1 is in my all-reduce and rank 0 in step control vector" in finding.sentence
    assert list(crashes.find(run.history())) == []


WATCHDOG = (
    "ranks entered different collectives: collective 24 is 'my all-reduce' on rank 1 and 'bucket 0' on rank(s) 0, 2"
)
GLOO = (
    "what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 600 vs 4. Received data size doesn't match "
    "expected size. Is there a distributed collective mismatch in your code?"
)
TORCH = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: OpType=BROADCAST, but Rank 1 is "
    "running collective: OpType=ALLREDUCE"
)


@pytest.mark.parametrize(
    ("incident", "named", "rank"),
    [
        ({"message": f"{WATCHDOG}; then rank 0 was killed by signal 6 (SIGABRT)"}, WATCHDOG, 1),
        ({"message": f"{WATCHDOG}; then rank 0 was killed by signal 9 (SIGKILL)"}, WATCHDOG, 1),
        ({"message": "rank 0 was killed by signal 6 (SIGABRT)", "log_tail": ["terminate called", GLOO]}, GLOO, 1),
        ({"message": TORCH, "error_type": "RuntimeError"}, TORCH, 1),
    ],
)
def test_collectives_that_the_log_calls_different_are_the_cause_of_a_crash(run, incident, named, rank):
    """The ranks have left the collective when the incident is written, and earlier attempts failed at other steps."""
    run.begin()
    run.steps(0, noisy(4))
    run.end("failed", rank=1, step=4, error_type="OSError")
    run.begin(step=0, ranks=3)
    run.steps(0, noisy(9))
    ranks = rank_rows(("step 9, sync", 26), ("step 9, forward", 24), ("step 9, sync", 26))
    fields = {"rank": 0, "step": 9, "error_type": "Killed", "ranks": ranks} | incident
    verdict = assign_verdict(Incident(2, "failed", **fields), [Incident(1, "failed", rank=1, step=4)]).verdict
    assert verdict == "first failure"
    run.end("failed", verdict=verdict, **fields)
    finding = diagnose_run(run.history())[0]
    assert (finding.cause, finding.variant, finding.rank, finding.step) == ("hang", "different collectives", rank, 9)
    assert named in finding.sentence
    assert "rank 1 at step 9, forward" in finding.sentence
    assert "same collectives in the same order" in finding.change.action
    assert "infrastructure" not in [one.variant for one in diagnose_run(run.history())]


@pytest.mark.parametrize(
    ("message", "counts", "rank"),
    [(GLOO, (27, 26), None), (GLOO, (27, 26, 26), 0), (GLOO, (27, 26, 25), None), (WATCHDOG, (27, 26), 1)],
)
def test_rank_that_calls_an_extra_collective_is_named_only_if_the_others_agree(run, message, counts, rank):
    run.begin(ranks=len(counts))
    run.steps(0, noisy(9))
    ranks = rank_rows(*(("step 9, sync", count) for count in counts))
    run.end("failed", rank=0, step=9, error_type="Killed", message=message, ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank) == ("different collectives", rank)


def test_of_two_ranks_in_different_collectives_none_is_named(run):
    run.begin()
    run.steps(0, noisy(9))
    ranks = rank_rows(("step 9, sync, waiting in my all-reduce", 36), ("step 9, sync, waiting in bucket 0", 36))
    run.end("hang", step=9, message="ranks make no progress", ranks=ranks)
    (finding,) = hangs.find(run.history())
    assert (finding.variant, finding.rank) == ("different collectives", None)
