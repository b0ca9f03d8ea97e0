"""Tests of `meshwright train --plan`: the best plan or a plan file decides the layout; options override both."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from meshwright.base.cli import main
from meshwright.base.config import config_to_toml, load_config
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.plan_to_config import resolve_plan
from meshwright.planner.search.search import search
from meshwright.planner.workload.workload_args import workload_from_config
from tests.kit.fake_machine import made_up_machine, write_machine
from tests.kit.small_run import SMALL, small_config


@pytest.fixture
def file(tmp_path):
    """A run file without a layout."""
    path = tmp_path / "run.toml"
    tree = config_to_toml(small_config(steps=3)).partition("\n[layout]")
    path.write_text(tree[0] + "\n[ddp]" + tree[2].partition("\n[ddp]")[2])
    return path


@pytest.fixture
def plan(tmp_path):
    """A plan file of the same run with another layout, and its prediction record."""
    path = tmp_path / "PLAN.toml"
    path.write_text(
        config_to_toml(
            small_config("--layout.shard=parameters", "--batch.micro=4", "--activation_checkpoint.mode=full")
        )
    )
    path.with_suffix(".json").write_text(json.dumps({"seconds": 0.125, "cluster": "h100"}))
    return path


def best(file, *overrides, cluster=None, ranks=None):
    return resolve_plan("best", cluster, file, overrides, ranks, None)


def from_file(plan, file, *overrides, ranks=None, steps=None):
    return resolve_plan(str(plan), None, file, overrides, ranks, steps)


def best_of_search(file, devices, *overrides):
    """The plan that the search ranks first."""
    work = workload_from_config(load_config(file), overrides)
    return search(CostCache(work, resolve_cluster("here").with_devices(devices))).ranked[0]


@pytest.mark.parametrize("memory", [4e9, 0.9e6, 0.7e6])
@pytest.mark.parametrize("ranks", [None, "2"])
def test_plan_best_is_the_first_plan_of_the_search(home, file, memory, ranks):
    write_machine(home, made_up_machine(memory=memory))
    found = best(file, ranks=ranks)
    chosen = best_of_search(file, int(ranks or 4))
    planned = candidate_config(load_config(file), Candidate.from_job(chosen.job))
    assert found.config == replace(planned, planned_for=f"made-up processor:{ranks or 4}x1")
    assert found.seconds == chosen.seconds
    assert Layout.from_config(found.config.layout).ranks == int(ranks or 4)
    assert found.message.startswith("plan: ")
    assert ("DDP" in found.message) == (Layout.from_config(found.config.layout).replicate != int(ranks or 4))
    assert "\n" not in found.message


def test_options_pin_settings_of_the_search(home, file):
    write_machine(home)
    found = best(file, "--layout.tensor=2", "--batch.micro=2", "--activation_checkpoint.mode=full", ranks="4")
    config = found.config
    assert (config.layout.tensor, config.batch.micro, config.activation_checkpoint.mode) == (2, 2, "full")
    assert Layout.from_config(config.layout).ranks == 4
    with pytest.raises(ConfigError, match=r"layout\.tensor"):
        best(file, "--layout.tensor=3", ranks="4")


def test_plan_best_takes_the_number_of_ranks_from_the_run_files_layout(home, tmp_path):
    write_machine(home)
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(small_config(ranks=2)))
    assert Layout.from_config(best(path).config.layout).ranks == 2
    assert Layout.from_config(best(path, ranks="4").config.layout).ranks == 4


def test_other_options_reach_the_planned_run(home, file):
    write_machine(home)
    assert best(file, "--optimizer.lr=0.5").config.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "this machine was never measured; try meshwright plan measure first"),
        ({"cluster": "nowhere"}, "cluster 'nowhere' is unknown"),
        ({"cluster": "h100:2", "ranks": "4"}, "4 ranks on 2 devices of cluster 'h100:2'; expected 1 to 2"),
        ({"cluster": "h100:2", "ranks": "0"}, "--ranks = 0 is out of range"),
        ({"cluster": "h100:2", "ranks": "many"}, "--ranks = many has the wrong type"),
    ],
)
def test_infeasible_plan_raises_config_error(file, arguments, message):
    with pytest.raises(ConfigError, match=message):
        best(file, **arguments)


def test_plan_best_accepts_a_named_cluster(file):
    assert Layout.from_config(best(file, cluster="h100:4").config.layout).ranks == 4


def test_a_model_that_does_not_fit_is_refused(home, file):
    write_machine(home, made_up_machine(memory=1e4))
    with pytest.raises(ConfigError, match="does not fit"):
        best(file)


def test_plan_file_decides_the_placement(plan, file):
    found = from_file(plan, file)
    assert found.config.layout == load_config(plan).layout
    assert (found.config.batch.micro, found.config.activation_checkpoint.mode) == (4, "full")
    assert found.config.steps == 3  # the run's own
    assert found.message == f"plan: {plan}, shard 2; predicted: 125 ms per step on h100"
    plan.with_suffix(".json").write_text("{")
    assert from_file(plan, file).message == f"plan: {plan}, shard 2"


def test_options_override_a_plan_file(plan, file):
    found = from_file(
        plan, file, "--activation_checkpoint.mode=none", "--batch.micro=2", "--seed=7", ranks="4", steps="9"
    )
    config = found.config
    assert (config.activation_checkpoint.mode, config.batch.micro, config.seed, config.steps) == ("none", 2, 7, 9)
    assert str(Layout.from_config(config.layout)) == "shard 4"


def test_plan_file_does_not_change_the_identity_of_the_run(plan, file):
    plan.write_text(
        plan.read_text().replace('comm_hook = "none"', 'comm_hook = "bf16_compress"').replace("lr = 0.003", "lr = 0.5")
    )
    assert load_config(plan).ddp.comm_hook == "bf16_compress"
    config = from_file(plan, file).config
    assert (config.ddp.comm_hook, config.optimizer.lr) == ("none", load_config(file).optimizer.lr)


def test_plan_file_is_the_run_without_a_run_file(plan):
    assert from_file(plan, None, steps="2").config.model == load_config(plan).model
    with pytest.raises(ConfigError, match="is for another run"):
        from_file(plan, None, "--preset=tiny")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--model.layers=3", "model.layers = 2 in the plan, 3 in the run"),
        ("--data.sequence=32", "data.sequence = 16 in the plan, 32 in the run"),
        ("--batch.global=32", "batch.global = 16 in the plan, 32 in the run"),
        ("--precision.compute=bf16", "precision.compute = fp32 in the plan, bf16 in the run"),
    ],
)
def test_plan_for_another_run_raises_with_the_first_difference(plan, file, override, message):
    with pytest.raises(ConfigError, match=message):
        from_file(plan, file, override)
    with pytest.raises(ConfigError, match=message):
        from_file(plan, None, override)


@pytest.mark.parametrize("name", ["fastest", "PLAN.json", "missing.toml"])
def test_train_rejects_a_plan_that_is_not_best_or_toml(name, file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--plan", name])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_train_rejects_an_unknown_cluster_before_it_starts(file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--cluster", "nowhere"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("meshwright: cluster 'nowhere' is unknown; expected a GPU (")


def test_train_follows_a_plan_file_and_report_compares_it(file, tmp_path, monkeypatch, capsys):
    """From the plan to the run to its report."""
    monkeypatch.chdir(tmp_path)
    main(["plan", str(file), "--cluster", "h100:2", "--layout.shard=gradients", "--out", "PLAN.toml"])
    capsys.readouterr()
    main(["train", str(file), "--plan", "PLAN.toml", "--run", "run", "--steps", "3"])
    told = capsys.readouterr().out
    assert told.startswith("plan: PLAN.toml, shard 2; predicted: ")
    layout = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["layout"]
    assert (layout["shard"], layout["replicate"]) == ("gradients", 2)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]["layout"]["sharding"] == "gradients"
    main(["report", "run", "--strict"])
    told = " ".join(capsys.readouterr().out.split())
    assert "communicated bytes as predicted" in told
    assert "the layout was planned for another machine: for h100:2x1, and the run was on " in told


def test_train_plan_best_writes_the_prediction(home, tmp_path, monkeypatch, capsys):
    write_machine(home)
    monkeypatch.chdir(tmp_path)
    main(["train", *SMALL, "--plan", "best", "--ranks", "2", "--run", "run", "--steps", "3", "--json"])
    first, *events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["kind"] == "plan"
    assert first["message"].startswith("plan: ")
    assert next(event for event in events if event["kind"] == "start")["ranks"] == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["cluster"], plan["seconds"]) == ("here", pytest.approx(first["seconds"]))
