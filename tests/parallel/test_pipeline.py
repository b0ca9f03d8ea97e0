"""Pipelines on real ranks: what each holds, when weight gradients are computed, and how blocks are divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config import ModelConfig, load_config
from meshwright.parallel.pipeline_parallel.pipeline_model import TrackedStage
from meshwright.prover.comm_volume import count_third_step
from meshwright.prover.reference import (
    LR,
    ConcatenatedSource,
    DataConfig,
    Loader,
    build_step,
    proof_source,
    proof_stream,
)
from meshwright.telemetry.step_clock import StepClock
from meshwright.testing import run_ranks
from meshwright.topology.schedule_timeline import build_timeline
from meshwright.topology.schedules import SCHEDULES, stages_on_rank
from meshwright.topology.stage_partition import block_cost, embedding_and_head_cost, partition_blocks
from meshwright.topology.unsupported import validate

SMALL = ["--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=18", "--model.vocab=26"]
SMALL += ["--data.sequence=16", "--layout.replicate=1", "--precision.compute=fp64"]


def config_of(kind, ranks, micros, *more):
    words = [f"--layout.pipeline={ranks}", f"--pipeline.schedule={kind}", f"--batch.global={micros}", "--batch.micro=1"]
    return load_config(overrides=[*SMALL, f"--model.layers={ranks * SCHEDULES[kind].default_stages}", *words, *more])


def step_of(world, config):
    layout, batch = validate(config)
    step = build_step(world, config, layout)
    loader = Loader(ConcatenatedSource([proof_source(config)]), proof_stream(config), batch, 0, DataConfig(workers=0))
    return step, loader


def paces(world, configs):
    """Of every config: live micro-batches by stage and of the rank, and the phases that the clock heard."""
    found = []
    for config in configs:
        step, loader = step_of(world, config)
        outcome = step.run(0, LR, loader.steps(0, 1))
        found.append((dict(outcome.in_flight.peak), outcome.in_flight.peak_total, outcome.clock.seconds()))
    return found


SIZES = [(kind, micros) for kind in SCHEDULES for micros in (4, 8)]


def test_each_rank_holds_as_many_micro_batches_as_its_schedule_says():
    ranks = 2
    found = run_ranks(paces, ranks, [config_of(kind, ranks, micros) for kind, micros in SIZES])
    for place, (kind, micros) in enumerate(SIZES):
        expected = build_timeline(kind, ranks, micros)
        for rank in range(ranks):
            live, most, phases = found[rank][place]
            assert live == expected.stage_peaks[rank], (kind, micros, rank)
            assert most == expected.rank_peaks[rank], (kind, micros, rank)
            assert phases["forward"] > 0
            assert phases["backward"] > 0
            assert phases["sync"] > 0


def test_1f1b_holds_a_micro_batch_for_every_rank_behind_where_gpipe_holds_all():
    ranks, micros = 4, 6
    found = run_ranks(paces, ranks, [config_of(kind, ranks, micros) for kind in ("gpipe", "1f1b")])
    assert [found[rank][0][0][rank] for rank in range(ranks)] == [micros] * ranks
    assert [found[rank][1][0][rank] for rank in range(ranks)] == [min(ranks - rank, micros) for rank in range(ranks)]


def activations(world, configs):
    return [count_third_step(world, config).memory.peak["activation"] for config in configs]


def test_the_first_stage_under_1f1b_holds_as_much_as_no_pipeline_at_all():
    """It has a part of the blocks and as many micro-batches as there are parts."""
    ranks, micros, layers = 2, 4, 8
    few = ["--model.vocab=8", f"--model.layers={layers}", "--model.width=32", "--model.ffn=64"]
    piped = [config_of(kind, ranks, micros, *few) for kind in ("1f1b", "gpipe")]
    alone = replace(piped[0], layout=replace(piped[0].layout, pipeline=1))
    [[whole]] = run_ranks(activations, 1, [alone])
    first, last = run_ranks(activations, ranks, piped)
    print(f"no pipeline {whole}, 1f1b {first[0]} and {last[0]}, gpipe {first[1]} and {last[1]}")
    assert first[0] == pytest.approx(whole, rel=0.15)
    assert last[0] == pytest.approx(whole / ranks, rel=0.15)
    assert first[1] > 1.8 * first[0]


class Spied:
    """Which of a stage's weights had a gradient after the first I of a later stage, and after the W that follows."""

    def __init__(self):
        self.seen = []
        self.right = TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk

    def look(self, stage, turn):
        if stage.stage_index and len(self.seen) == turn:
            self.seen.append([p.grad is not None for p in stage.submod.parameters()])

    def __enter__(self):
        backward, weight = self.right

        def spied_backward(stage, *args, **kwargs):
            backward(stage, *args, **kwargs)
            if not kwargs.get("full_backward", True):
                self.look(stage, 0)

        def spied_weight(stage, *args, **kwargs):
            weight(stage, *args, **kwargs)
            self.look(stage, 1)

        TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk = spied_backward, spied_weight
        return self.seen

    def __exit__(self, *_):
        TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk = self.right


def deferred(world, configs):
    found = []
    for config in configs:
        step, loader = step_of(world, config)
        with Spied() as seen:
            step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device))
        found.append(seen)
    return found


def test_weight_gradients_are_deferred_where_the_schedule_says_so():
    kinds = ("zero-bubble", "zbv")
    configs = [config_of(kind, 2, 4) for kind in kinds]
    for found in run_ranks(deferred, 2, configs):
        for after_input, after_weight in found:
            assert not any(after_input)
            assert all(after_weight)


def names(world, configs):
    return [list(build_step(world, config, validate(config)[0]).parallel_model.parameters()) for config in configs]


def test_stages_together_have_every_parameter_once_under_its_own_name():
    from meshwright.models.init import build_model

    configs = [config_of(kind, 2, 4, f"--model.tie={tie}") for kind in SCHEDULES for tie in ("false", "true")]
    found = run_ranks(names, 2, configs)
    for place, config in enumerate(configs):
        held = [name for rank in found for name in rank[place]]
        assert sorted(held) == sorted(name for name, _ in build_model(config.model, 0).named_parameters())


MODEL = ModelConfig(layers=8, width=64, vocab=256, ffn=176)


def test_stages_are_contiguous_and_none_is_empty():
    for layers in (1, 2, 5, 8, 13):
        for stages in range(1, layers + 1):
            found = partition_blocks(replace(MODEL, layers=layers), 128, stages)
            assert [block for span in found for block in span] == list(range(layers))
            assert all(found)


def test_no_other_division_has_a_cheaper_dearest_stage():
    from itertools import combinations

    for vocab in (16, 256, 4096, 60000):
        model = replace(MODEL, vocab=vocab)
        first, last = embedding_and_head_cost(model)
        costs = [block_cost(model, 128)] * model.layers
        costs[0] += first
        costs[-1] += last
        for stages in (2, 3, 4):
            dearest = max(sum(costs[block] for block in span) for span in partition_blocks(model, 128, stages))
            every = [
                max(sum(costs[a:b]) for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True))
                for cuts in combinations(range(1, model.layers), stages - 1)
            ]
            assert dearest == min(every)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_blocks():
    sizes = [len(span) for span in partition_blocks(replace(MODEL, vocab=4096, layers=16), 128, 4)]
    assert sizes[-1] < sizes[0]
    assert [len(span) for span in partition_blocks(replace(MODEL, vocab=2, layers=16), 128, 4)] == [4, 4, 4, 4]


def test_in_a_v_the_first_rank_has_both_ends():
    assert stages_on_rank("zbv", 4, 0, 2) == [0, 7]
