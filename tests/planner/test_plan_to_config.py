"""`meshwright train --plan`: the search's first plan or a plan file decides the layout, and words come before both."""

from __future__ import annotations

import json
import tomllib

import pytest
from fake_machine import made_up_machine, write_machine
from small_run import SMALL, small_config

from meshwright.cli import main
from meshwright.config import config_to_toml, load_config
from meshwright.errors import ConfigError
from meshwright.planner.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.plan_to_config import resolve_plan
from meshwright.planner.search.search import CostCache, search
from meshwright.planner.workload.workload_args import workload_from_config
from meshwright.topology.layout import Layout


@pytest.fixture
def file(tmp_path):
    """A run file without a layout."""
    path = tmp_path / "run.toml"
    tree = config_to_toml(small_config(steps=3)).partition("\n[layout]")
    path.write_text(tree[0] + "\n[ddp]" + tree[2].partition("\n[ddp]")[2])
    return path


@pytest.fixture
def plan(tmp_path):
    """A plan file of the same run, spread in another way, its figures beside it."""
    path = tmp_path / "PLAN.toml"
    path.write_text(
        config_to_toml(
            small_config("--layout.shard=parameters", "--batch.micro=4", "--activation_checkpoint.mode=full")
        )
    )
    path.with_suffix(".json").write_text(json.dumps({"seconds": 0.125, "cluster": "h100"}))
    return path


def best(file, *words, cluster=None, ranks=None):
    return resolve_plan("best", cluster, file, words, ranks, None)


def of_plan(plan, file, *words, ranks=None, steps=None):
    return resolve_plan(str(plan), None, file, words, ranks, steps)


def searched(file, devices, *words):
    """What the search says by itself."""
    work = workload_from_config(load_config(file), words)
    return search(CostCache(work, resolve_cluster("here").with_devices(devices))).ranked[0]


@pytest.mark.parametrize("memory", [4e9, 0.9e6, 0.7e6])
@pytest.mark.parametrize("ranks", [None, "2"])
def test_best_is_what_the_search_says(home, file, memory, ranks):
    write_machine(home, made_up_machine(memory=memory))
    found = best(file, ranks=ranks)
    chosen = searched(file, int(ranks or 4))
    assert found.config == candidate_config(load_config(file), Candidate.of(chosen.job))
    assert found.seconds == chosen.seconds
    assert Layout.from_config(found.config.layout).ranks == int(ranks or 4)
    assert found.message.startswith("plan: ")
    assert ("DDP" in found.message) == (Layout.from_config(found.config.layout).replicate != int(ranks or 4))
    assert "\n" not in found.message


def test_words_pin_the_search(home, file):
    write_machine(home)
    found = best(file, "--layout.tensor=2", "--batch.micro=2", "--activation_checkpoint.mode=full", ranks="4")
    config = found.config
    assert (config.layout.tensor, config.batch.micro, config.activation_checkpoint.mode) == (2, 2, "full")
    assert Layout.from_config(config.layout).ranks == 4
    with pytest.raises(ConfigError, match=r"layout\.tensor"):
        best(file, "--layout.tensor=3", ranks="4")


def test_a_run_file_with_a_layout_says_how_many_ranks(home, tmp_path):
    write_machine(home)
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(small_config(ranks=2)))
    assert Layout.from_config(best(path).config.layout).ranks == 2
    assert Layout.from_config(best(path, ranks="4").config.layout).ranks == 4


def test_other_words_are_the_runs_own(home, file):
    write_machine(home)
    assert best(file, "--optimizer.lr=0.5").config.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "this machine was never measured; run meshwright plan measure first"),
        ({"cluster": "nowhere"}, "no cluster 'nowhere'"),
        ({"cluster": "h100:2", "ranks": "4"}, "4 ranks on 2 devices of cluster 'h100:2'; allowed: 1 to 2"),
        ({"cluster": "h100:2", "ranks": "0"}, "--ranks = 0 is out of range"),
        ({"cluster": "h100:2", "ranks": "many"}, "--ranks = many has the wrong type"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(file, words, said):
    with pytest.raises(ConfigError, match=said):
        best(file, **words)


def test_a_cluster_may_be_named_instead(file):
    assert Layout.from_config(best(file, cluster="h100:4").config.layout).ranks == 4


def test_a_model_that_does_not_fit_is_refused(home, file):
    write_machine(home, made_up_machine(memory=1e4))
    with pytest.raises(ConfigError, match="does not fit"):
        best(file)


def test_a_plan_file_decides_the_placement(plan, file):
    found = of_plan(plan, file)
    assert found.config.layout == load_config(plan).layout
    assert (found.config.batch.micro, found.config.activation_checkpoint.mode) == (4, "full")
    assert found.config.steps == 3  # the run's own
    assert found.message == f"plan: {plan}, shard 2; predicted: 125 ms a step on h100"
    plan.with_suffix(".json").write_text("{")
    assert of_plan(plan, file).message == f"plan: {plan}, shard 2"


def test_words_win_over_a_plan_file(plan, file):
    found = of_plan(
        plan, file, "--activation_checkpoint.mode=none", "--batch.micro=2", "--seed=7", ranks="4", steps="9"
    )
    config = found.config
    assert (config.activation_checkpoint.mode, config.batch.micro, config.seed, config.steps) == ("none", 2, 7, 9)
    assert str(Layout.from_config(config.layout)) == "shard 4"


def test_what_changes_the_numbers_stays_the_runs_own(plan, file):
    plan.write_text(
        plan.read_text().replace('comm_hook = "none"', 'comm_hook = "bf16_compress"').replace("lr = 0.003", "lr = 0.5")
    )
    assert load_config(plan).ddp.comm_hook == "bf16_compress"
    config = of_plan(plan, file).config
    assert (config.ddp.comm_hook, config.optimizer.lr) == ("none", load_config(file).optimizer.lr)


def test_without_a_run_file_the_plan_is_the_run(plan):
    assert of_plan(plan, None, steps="2").config.model == load_config(plan).model
    with pytest.raises(ConfigError, match="is for another run"):
        of_plan(plan, None, "--preset=tiny")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--model.layers=3", "model.layers = 2 there and 3 here"),
        ("--data.sequence=32", "data.sequence = 16 there and 32 here"),
        ("--batch.global=32", "batch.global = 16 there and 32 here"),
        ("--precision.compute=bf16", "precision.compute = fp32 there and bf16 here"),
    ],
)
def test_a_plan_for_another_run_is_refused_with_the_first_difference(plan, file, word, said):
    with pytest.raises(ConfigError, match=said):
        of_plan(plan, file, word)
    with pytest.raises(ConfigError, match=said):
        of_plan(plan, None, word)


@pytest.mark.parametrize("name", ["fastest", "PLAN.json", "missing.toml"])
def test_what_is_no_plan_is_refused(name, file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--plan", name])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_cluster_is_checked_before_anything_starts(file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--cluster", "nowhere"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("meshwright: no cluster 'nowhere'; allowed: ")


def test_a_run_trains_as_a_written_plan_says(file, tmp_path, monkeypatch, capsys):
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
    assert "bytes equal" in capsys.readouterr().out


def test_a_run_trains_by_the_best_plan(home, tmp_path, monkeypatch, capsys):
    write_machine(home)
    monkeypatch.chdir(tmp_path)
    main(["train", *SMALL, "--plan", "best", "--ranks", "2", "--run", "run", "--steps", "3", "--json"])
    first, *events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["kind"] == "plan"
    assert first["message"].startswith("plan: ")
    assert next(event for event in events if event["kind"] == "start")["ranks"] == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["cluster"], plan["seconds"]) == ("here", pytest.approx(first["seconds"]))
