"""Tests of `meshwright data` on a run of reinforcement learning that has trained: records and lookups agree."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright import train
from meshwright.base.cli import main
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from tests.kit.small_run import load_cpu_config

SETTINGS = [
    "--model.width=16",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=16",
    "--model.vocab=64",
    "--data.sequence=16",
    "--batch.global=8",
    "--batch.micro=4",
    "--rl.objective=grpo",
    "--rl.task=strings",
    "--rl.group_size=4",
    "--rl.completion_tokens=3",
    "--rl.staleness=1",
    "--launch.device=cpu",
    "--launch.threads=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("rollouts") / "run"
    train(load_cpu_config(overrides=SETTINGS, steps=3, ranks=1), run=folder, quiet=True)
    return RunFolder(folder)


def answer(capsys, *args: str) -> dict:
    main(["data", *args, "--json"])
    return json.loads(capsys.readouterr().out)


def test_rollouts_of_a_step_are_found_where_they_were_trained(run, capsys):
    shown = answer(capsys, "show", str(run.root), "--step", "2")
    assert len(shown["rollouts"]) == 8
    assert shown["conserved"]
    assert all(row["prompt"].endswith("=") and 0 <= row["staleness"] <= 1 for row in shown["rollouts"])
    assert [row["row"] for row in shown["rollouts"]] == list(range(8))
    last = shown["rollouts"][-1]
    (record,) = answer(capsys, "find", str(run.root), "--rollout", last["id"])["records"]
    assert (record["fate"], record["step"], record["attempt"]) == ("trained", 2, 1)
    (found,) = record["rollouts"]
    assert {name: found[name] for name in ("row", "rank", "reward", "completion", "position")} == {
        name: last[name] for name in ("row", "rank", "reward", "completion", "position")
    }


def test_history_has_the_account_and_the_shares(run):
    rollouts = RunHistory(run).rollouts
    assert rollouts.counts is not None
    assert rollouts.counts.conserved
    assert rollouts.counts.trained.rollouts == 24
    assert len(rollouts.table) == 3
    assert 0 <= rollouts.table.learner_idle_share <= 1
    assert 0 <= rollouts.table.generator_idle_share <= 1


def test_waiting_for_rollouts_is_not_counted_as_a_save(run):
    """Publication of a policy is part of the fetch phase; what a step counts is not counted outside of it again."""
    table = RunHistory(run).steps()
    outside = np.nansum([seconds[1:] for seconds in table.outside.values()], axis=0)
    between = table.begin[1:] - table.end[:-1]
    assert (outside <= between + 0.01).all()
