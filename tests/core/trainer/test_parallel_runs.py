"""Whole runs on every mesh axis: equal losses, equal bits when repeated, and records of pipeline and experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright import train
from meshwright.base.records.events import read_events
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.trainer.expert_balancer import ExpertBalancer, imbalance
from tests.kit.small_run import small_config

PIPELINE = ("--layout.pipeline=2", "--batch.micro=2", "--model.layers=4")
LAYOUTS = {
    "one process": (1, ()),
    "pipeline": (2, PIPELINE),
    "zbv pipeline": (2, (*PIPELINE, "--pipeline.schedule=zbv")),
    "ring": (2, ("--layout.context=2",)),
    "all-to-all": (2, ("--layout.context=2", "--context.method=all-to-all")),
    "expert parallel over replicas": (2, ("--layout.expert=2",)),
    "expert parallel over shards and pipeline": (4, (*PIPELINE, "--layout.expert=2", "--layout.shard=optimizer")),
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
        name: run(folder / name.replace(" ", "-"), small_config(*EXPERTS, *options, "--log_every=2", ranks=ranks))
        for name, (ranks, options) in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_those_of_one_process(name, runs):
    expected, actual = (steps(runs[which][1]) for which in ("one process", name))
    for key in ("loss", "grad_norm", "tokens"):
        assert np.allclose([e[key] for e in expected], [e[key] for e in actual], rtol=1e-10)
    assert [e["loss"] for e in runs["one process"][1] if e["kind"] == "eval"] == pytest.approx(
        [e["loss"] for e in runs[name][1] if e["kind"] == "eval"], rel=1e-10
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_expert_loads_are_summed_over_all_ranks(name, runs):
    """Loads are counts, so they are equal on every layout; every token chooses two experts."""
    recorded = [e for e in runs[name][1] if e["kind"] == "experts"]
    assert [e["step"] for e in recorded] == [0, 2, 4]
    assert [e["loads"] for e in recorded] == [e["loads"] for e in runs["one process"][1] if e["kind"] == "experts"]
    for event in recorded:
        assert [sum(block) for block in event["loads"]] == [16 * 16 * 2] * 4
        assert event["dropped"] == [0] * 4
    worst = max(max(block) * 4 / sum(block) for block in recorded[0]["loads"])
    assert steps(runs[name][1])[0]["experts"] == {"imbalance": pytest.approx(worst, abs=1e-4), "dropped": 0}


@pytest.mark.parametrize("name", [name for name, (_, options) in LAYOUTS.items() if "--layout.pipeline=2" in options])
def test_pipeline_records_the_predicted_micro_batches_in_flight(name, runs):
    start, *_ = runs[name][1]
    for event in steps(runs[name][1]):
        assert event["pipeline"]["live"] == start["pipeline"]["live"]
        assert 0 < event["pipeline"]["idle"] < 1
    assert start["pipeline"]["bubble"] > 0
    assert start["parameters"] == runs["one process"][1][0]["parameters"]


def test_pipeline_run_repeated_has_the_same_bits(tmp_path, runs):
    ranks, options = LAYOUTS["expert parallel over shards and pipeline"]
    repeated, _ = run(tmp_path / "repeated", small_config(*EXPERTS, *options, "--log_every=2", ranks=ranks))
    assert repeated.parameters_digest == runs["expert parallel over shards and pipeline"][0].parameters_digest


def test_router_biases_converge_to_an_even_load():
    """Starts from a bias that sends every token to the first expert."""
    config = small_config("--model.experts=4", "--model.experts_active=1", "--model.router_bias_rate=0.05", ranks=1)
    model, tokens = (
        build_model(config.model, 0),
        torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0)),
    )
    balancer = ExpertBalancer(model, config, World())
    for block in model.decoder.blocks:
        block.ffn.router.bias[0] = 1.0
    imbalances = []
    for _ in range(40):
        model(tokens, tokens)
        imbalances.append(imbalance(balancer.update_biases(torch.tensor(True))))
    assert imbalances[0] == 4.0
    assert imbalances[-1] < 1.6
    before = [block.ffn.router.bias.clone() for block in model.decoder.blocks]
    model(tokens, tokens)
    balancer.update_biases(torch.tensor(False))  # a skipped step
    assert all(torch.equal(b, block.ffn.router.bias) for b, block in zip(before, model.decoder.blocks, strict=True))


def test_expert_capacity_drops_tokens_and_records_them(tmp_path):
    options = ("--model.experts=4", "--model.capacity_factor=0.5", "--log_every=1")
    _, events = run(tmp_path / "dropped", small_config(*options, steps=2))
    recorded = [event for event in events if event["kind"] == "experts"]
    assert all(sum(event["dropped"]) > 0 for event in recorded)
    assert [event["experts"]["dropped"] for event in steps(events)] == [sum(event["dropped"]) for event in recorded]
