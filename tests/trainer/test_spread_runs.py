"""Whole runs over the axes: the same losses on all of them, the same bits again, and what they record of themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_run import small_config

from meshwright import train
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.telemetry.events import read_events
from meshwright.trainer.expert_balancer import ExpertBalancer, imbalance

PIPED = ("--layout.pipeline=2", "--batch.micro=2", "--model.layers=4")
LAYOUTS = {
    "alone": (1, ()),
    "pipeline": (2, PIPED),
    "a v of stages": (2, (*PIPED, "--pipeline.schedule=zbv")),
    "ring": (2, ("--layout.context=2",)),
    "all-to-all": (2, ("--layout.context=2", "--context.method=all-to-all")),
    "experts over copies": (2, ("--layout.expert=2",)),
    "experts over shards, in stages": (4, (*PIPED, "--layout.expert=2", "--layout.shard=optimizer")),
}
EXPERTS = ("--model.experts=4", "--model.router_bias_rate=0.01", "--model.layers=4", "--precision.compute=fp64")


def run(folder, config):
    result = train(config, run=folder, quiet=True)
    return result, list(read_events(folder / "events" / "rank-00000.jsonl"))


def steps(events):
    return [event for event in events if event["kind"] == "step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name.replace(" ", "-"), small_config(*EXPERTS, *words, "--log_every=2", ranks=ranks))
        for name, (ranks, words) in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_has_the_losses_of_one_process(name, runs):
    alone, here = (steps(runs[which][1]) for which in ("alone", name))
    for key in ("loss", "grad_norm", "tokens"):
        assert np.allclose([e[key] for e in alone], [e[key] for e in here], rtol=1e-10)
    assert [e["loss"] for e in runs["alone"][1] if e["kind"] == "eval"] == pytest.approx(
        [e["loss"] for e in runs[name][1] if e["kind"] == "eval"], rel=1e-10
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_of_experts_are_those_of_all_ranks(name, runs):
    """They are counts, so equal on every layout, and every token visits two experts."""
    told = [e for e in runs[name][1] if e["kind"] == "experts"]
    assert [e["step"] for e in told] == [0, 2, 4]
    assert [e["loads"] for e in told] == [e["loads"] for e in runs["alone"][1] if e["kind"] == "experts"]
    for event in told:
        assert [sum(block) for block in event["loads"]] == [16 * 16 * 2] * 4
        assert event["dropped"] == [0] * 4
    worst = max(max(block) * 4 / sum(block) for block in told[0]["loads"])
    assert steps(runs[name][1])[0]["experts"] == {"imbalance": pytest.approx(worst, abs=1e-4), "dropped": 0}


@pytest.mark.parametrize("name", [name for name, (_, words) in LAYOUTS.items() if "--layout.pipeline=2" in words])
def test_a_pipeline_records_what_it_promised(name, runs):
    start, *_ = runs[name][1]
    for event in steps(runs[name][1]):
        assert event["pipeline"]["live"] == start["pipeline"]["live"]
        assert 0 < event["pipeline"]["idle"] < 1
    assert start["pipeline"]["bubble"] > 0
    assert start["parameters"] == runs["alone"][1][0]["parameters"]


def test_a_pipeline_run_twice_has_the_same_bits(tmp_path, runs):
    ranks, words = LAYOUTS["experts over shards, in stages"]
    again, _ = run(tmp_path / "again", small_config(*EXPERTS, *words, "--log_every=2", ranks=ranks))
    assert again.parameters_digest == runs["experts over shards, in stages"][0].parameters_digest


def test_biases_move_towards_an_even_load():
    """From a bias that sends every token to the first expert, until it has no more than the others."""
    config = small_config("--model.experts=4", "--model.experts_active=1", "--model.router_bias_rate=0.05", ranks=1)
    model, tokens = (
        build_model(config.model, 0),
        torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0)),
    )
    balancer = ExpertBalancer(model, config, World())
    for block in model.decoder.blocks:
        block.ffn.router.bias[0] = 1.0
    unevenness = []
    for _ in range(40):
        model(tokens, tokens)
        unevenness.append(imbalance(balancer.update_biases(torch.tensor(True))))
    assert unevenness[0] == 4.0
    assert unevenness[-1] < 1.6
    before = [block.ffn.router.bias.clone() for block in model.decoder.blocks]
    model(tokens, tokens)
    balancer.update_biases(torch.tensor(False))  # a step that is skipped
    assert all(torch.equal(b, block.ffn.router.bias) for b, block in zip(before, model.decoder.blocks, strict=True))


def test_a_capacity_drops_tokens_and_says_so(tmp_path):
    words = ("--model.experts=4", "--model.capacity_factor=0.5", "--log_every=1")
    _, events = run(tmp_path / "dropped", small_config(*words, steps=2))
    told = [event for event in events if event["kind"] == "experts"]
    assert all(sum(event["dropped"]) > 0 for event in told)
    assert [event["experts"]["dropped"] for event in steps(events)] == [sum(event["dropped"]) for event in told]
