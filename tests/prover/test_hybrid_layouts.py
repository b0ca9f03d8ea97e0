"""Hybrid layouts equal the reference: every axis, every pair of axes, and the meshes of large runs."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import validate
from meshwright.prover.claims import describe_settings
from tests.kit.hybrid_layouts import HYBRIDS, overrides_of
from tests.kit.small_run import load_cpu_config
from tests.prover.traced_cases import AS_CONFIGURED, FLOAT64, VARIATION, Case, check_cases, failed_runs

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
SIZES = {"vocab": 26, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 18}


def small_options(row: str, *more: str) -> tuple[str, ...]:
    """A row of the matrix with a small model, three steps, and at least two micro-batches per step."""
    given = overrides_of(row)
    sizes = [f"--model.{name}={size}" for name, size in SIZES.items() if f"--model.{name}=" not in " ".join(given)]
    layout = Layout.from_config(load_cpu_config(overrides=given).layout)
    batch = (f"--batch.global={layout.data_degree * max(2, 2 * layout.pipeline)}", "--batch.micro=1")
    return (*sizes, *given, *batch, "--steps=3", "--optimizer.clip=0.1", *more)


def hybrid_config(row):
    return load_cpu_config(overrides=small_options(row))


def test_87_hybrid_layouts_are_valid():
    layouts = set()
    for row in HYBRIDS:
        config = load_cpu_config(overrides=small_options(row))
        layout, _ = validate(config)
        assert 2 <= layout.ranks <= 8
        layouts.add((f"{layout}{describe_settings(config)}", config.model))
    assert len(layouts) == len(HYBRIDS) == 87


def test_hybrid_layouts_cover_every_pair_of_axes():
    axes = [Layout.from_config(hybrid_config(row).layout).active_axes for row in HYBRIDS]
    covered = {pair for used in axes for pair in combinations(sorted(used), 2)}
    assert covered == set(combinations(sorted(AXES), 2))
    assert {len(used) for used in axes} == {1, 2, 3, 4}


def test_hybrid_layouts_cover_every_schedule_context_method_and_shard_level():
    configs = [hybrid_config(row) for row in HYBRIDS]
    assert {c.pipeline.schedule for c in configs if c.layout.pipeline == 8} == set(SCHEDULES)
    assert {c.context.method for c in configs if c.layout.context == 8} == {"ring", "all-to-all"}
    assert {c.layout.shard for c in configs if c.layout.expert > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.layout.shard for c in configs if c.layout.context > 1} == {"none", "optimizer", "gradients", "parameters"}
    assert {c.activation_checkpoint.mode for c in configs} == {"none", "full", "selective"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", HYBRIDS)
def test_every_hybrid_layout_equals_the_reference(row):
    assert failed_runs(small_options(row)) == []


TIED = ("--model.tie=true",)
QUICK = [
    Case(small_options("pipeline=2"), FLOAT64),
    Case(small_options("pipeline=2 schedule=interleaved separator=0"), FLOAT64),
    Case(small_options("pipeline=2 schedule=zero-bubble stages=1"), AS_CONFIGURED),
    Case(small_options("pipeline=2 schedule=dualpipev"), FLOAT64),
    Case(small_options("context=2"), VARIATION),
    Case(small_options("context=2 method=all-to-all heads=4 kv_heads=1 recompute=selective", *TIED), FLOAT64),
    Case(small_options("replicate=2 shard=parameters expert=2 experts=4 experts_shared=1"), FLOAT64),
    Case(small_options("replicate=2 shard=parameters pipeline=2", *TIED), FLOAT64),
    Case(small_options("tensor=2 pipeline=2 schedule=zbv"), FLOAT64),
    Case(small_options("replicate=2 shard=parameters context=2", *TIED), FLOAT64),
    Case(small_options("replicate=2 tensor=2 expert=2 experts=4 experts_shared=1"), FLOAT64),
]
"""Every axis and every schedule but gpipe, which is in test_clean_configs.py."""
LONG = [
    Case(small_options("pipeline=2 schedule=zbv", *TIED), FLOAT64),
    Case(small_options("context=2"), AS_CONFIGURED),
    Case(small_options("replicate=2 expert=2 experts=4 ffn=16"), AS_CONFIGURED),
    Case(small_options("replicate=2 pipeline=2"), FLOAT64),
    Case(small_options("context=2 pipeline=2 separator=0", *TIED), FLOAT64),
    Case(small_options("context=2 tensor=2"), FLOAT64),
    Case(small_options("context=2 expert=2 experts=4", *TIED), FLOAT64),
    Case(small_options("replicate=2 pipeline=2 expert=2 experts=4"), FLOAT64),
]
"""Further pairs of axes."""


@cache
def check_all(ranks: int, long: bool) -> dict[Case, tuple[bool, str]]:
    """The results of all quick or all long cases with this number of ranks, from one launch."""
    cases = [case for case in (LONG if long else QUICK) if case.ranks == ranks]
    return dict(zip(cases, check_cases(cases), strict=True))


def describe(case: Case) -> str:
    return f"{' '.join(option.removeprefix('--') for option in case.options[5:])}, {case.run}"


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=describe)
def test_hybrid_layout_equals_the_reference(case):
    passed, measured = check_all(case.ranks, case in LONG)[case]
    assert passed, measured
