"""Tests of the choices that a run makes by measurement, with given times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import FakeTensors
from meshwright.core.trainer.first_batch import choices as module
from meshwright.core.trainer.first_batch.attention_calls import AttentionCalls
from meshwright.core.trainer.first_batch.choices import (
    Choices,
    faster_scope,
    fastest,
    make_choices,
    pays,
    recorded_choices,
)
from tests.kit.small_run import small_config

DEVICE = "a device"


class OtherRanks(World):
    """A world whose other ranks have measured other times."""

    def all_gather_ints(self, *numbers, name):
        return [list(numbers), *OTHERS]


OTHERS = [[3000, 2000, 5000], [1000, 2500, -1]]


@pytest.fixture
def cuda(monkeypatch):
    """A step on a CUDA device: candidates take the times of the test, and what is applied is listed."""
    applied: list[str] = []
    monkeypatch.setattr(module, "device_name", lambda _device: DEVICE)
    monkeypatch.setattr(module, "use_attention_backends", lambda backends: applied.append(backends[0].name))
    monkeypatch.setattr(module, "compile_whole", lambda _module, _budget: applied.append("model"))
    monkeypatch.setattr(module, "use_cudnn_backward", lambda _enabled: None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)

    def run(*overrides, attention=None, scope=None, choices=None, ranks=1, broadcast=None):
        config = small_config("--layout.replicate=1", "--compile.enabled=true", *overrides, ranks=ranks)
        job = SimpleNamespace(config=config, layout=Layout.from_config(config.layout), custom=None, first_step=0)
        identity = {"choices": choices or {}}
        monkeypatch.setattr(module, "time_attention", lambda _step, _inputs: attention)
        monkeypatch.setattr(module, "time_scopes", lambda _job, _step, _inputs: scope)
        single = World()
        world = SimpleNamespace(
            device=torch.device("cuda"),
            size=1,
            all_gather_ints=single.all_gather_ints,
            broadcast_object=broadcast or single.broadcast_object,
        )
        step = SimpleNamespace(
            world=world, load_first=lambda _first: (torch.zeros(1),), parallel_model=SimpleNamespace(module=None)
        )
        applied.clear()
        return make_choices(job, step, identity, lambda: None), identity["choices"], list(applied)

    return run


def test_fastest_candidates_are_applied_and_recorded(cuda):
    attention, scope = {"cudnn": 2.4, "flash": 3.8, "efficient": None}, {"block": 10.0, "model": 9.0}
    choices, record, applied = cuda(attention=attention, scope=scope)
    assert (choices.attention, choices.scope, applied) == ("cudnn", "model", ["CUDNN_ATTENTION"])
    assert record == {"device": DEVICE, "attention": "cudnn", "scope": "model"}
    assert choices.summary == "attention cudnn 2.4 ms (flash 3.8), compile of the whole model 9.0 ms (block 10.0)"
    assert choices.to_json()["milliseconds"] == {"attention": attention, "scope": scope}


def test_continued_run_reuses_its_choices_and_measures_nothing(cuda):
    record = {"device": DEVICE, "attention": "flash", "scope": "model"}
    choices, after, applied = cuda(choices=record)
    assert (choices.attention, choices.scope, choices.reused) == ("flash", "model", True)
    assert after == record
    assert applied == ["FLASH_ATTENTION", "model"]
    assert choices.milliseconds == {}


def test_settings_take_precedence_over_choices_and_are_not_recorded(cuda):
    record = {"device": DEVICE, "attention": "flash", "scope": "model"}
    choices, after, applied = cuda("--kernels.attention=efficient", "--compile.scope=block", choices=record)
    assert (choices.attention, choices.scope, after) == ("efficient", "block", record)
    assert applied == ["EFFICIENT_ATTENTION"]


def test_rank_with_another_device_reuses_the_choices_of_the_first_rank(cuda):
    record = {"device": "the device of rank 0", "attention": "flash", "scope": "block"}
    choices, kept, _ = cuda(choices=record, broadcast=lambda _device, _name: "the device of rank 0")
    assert (choices.attention, choices.reused, kept) == ("flash", True, record)


def test_another_device_chooses_again(cuda):
    record = {"device": "another device", "attention": "flash", "scope": "model"}
    choices, after, _ = cuda(choices=record, attention={"cudnn": 1.0, "flash": 2.0}, scope={"block": 1.0})
    assert (choices.attention, choices.scope, choices.reused) == ("cudnn", "block", False)
    assert after["device"] == DEVICE


def test_deterministic_run_chooses_by_rule(cuda, monkeypatch):
    """Two runs would choose differently where candidates are equally fast."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(module, "has_cudnn_frontend", lambda: False)
    choices, record, applied = cuda(attention={"cudnn": 1.0}, scope={"block": 2.0, "model": 1.0})
    assert (choices.attention, choices.milliseconds, applied) == ("flash", {}, ["FLASH_ATTENTION"])
    assert record == {"device": DEVICE, "attention": "flash", "scope": "block"}


@pytest.mark.parametrize(
    "record", [None, [], {"device": DEVICE, "attention": "rm -rf", "scope": ["model"]}, {"device": 3}, {}]
)
def test_damaged_record_of_choices_is_ignored(record):
    assert recorded_choices(record, DEVICE) == {}


def test_ranks_agree_on_the_times_of_the_slowest_rank():
    times = module.slowest_ranks(OtherRanks(), {"cudnn": 1.0, "flash": 2.1, "efficient": 0.5})
    assert times == {"cudnn": 3.0, "flash": 2.5, "efficient": None}
    assert fastest(times) == "flash"
    assert fastest({"cudnn": 0.0, "flash": None}) is None


def test_whole_model_is_compiled_only_if_it_is_faster_by_more_than_noise():
    assert faster_scope({"block": 100.0, "model": 98.0}) == "model"
    assert faster_scope({"block": 100.0, "model": 99.5}) == "block"
    assert faster_scope({"block": 100.0, "model": None}) == faster_scope({"block": 100.0}) == "block"


def test_whole_model_is_tried_if_the_run_is_long_enough():
    assert pays(steps=40_000, step_seconds=0.06)
    assert not pays(steps=10_000, step_seconds=0.06)


def test_nothing_is_measured_on_a_cpu():
    config = small_config(ranks=1)
    job = SimpleNamespace(config=config, layout=Layout.from_config(config.layout), custom=None)
    identity = {"choices": {"device": "a GPU", "attention": "cudnn"}}
    assert make_choices(job, SimpleNamespace(world=World()), identity, lambda: None) == Choices()
    assert identity["choices"]["device"] == "a GPU"


def test_calls_of_attention_are_counted_by_their_arguments():
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    with AttentionCalls() as calls:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        F.scaled_dot_product_attention(q, q, q)
        with FakeTensors().mode as fake:  # the trace of a pipeline: its masks have no values
            F.scaled_dot_product_attention(*[fake.from_tensor(q)] * 3)
    assert sorted(calls.counts.values()) == [1, 3]


def test_model_that_cannot_be_compiled_as_a_whole_keeps_its_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    compiled = SimpleNamespace(forward="with blocks")
    times = iter([2000.0])

    def compile_whole(model, _budget):
        model.forward = "whole"

    monkeypatch.setattr(module, "compile_whole", compile_whole)
    monkeypatch.setattr(module, "time_passes", lambda _step, _inputs: next(times))  # the second raises StopIteration
    config = small_config(ranks=1, steps=100_000)
    job = SimpleNamespace(config=config, first_step=0, batch=SimpleNamespace(accumulation=1))
    step = SimpleNamespace(parallel_model=SimpleNamespace(module=compiled))
    assert module.time_scopes(job, step, ()) == {"block": 2000.0, "model": None}
    assert compiled.forward == "with blocks"
