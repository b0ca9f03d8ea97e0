"""A run that is stopped on one layout and resumed on others equals a run on one rank."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.inspect import list_rows
from meshwright.core.checkpoint.unsharded import read_full_tensor, to_float64
from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import STEPS
from tests.kit.small_run import step_records

EXACT = ("--precision.compute=fp64", "--model.layers=4", "--model.tie=true", "--eval.every=4", "--batch.micro=2")
EXPERTS = ("--model.experts=4", "--model.router_bias_rate=0.01")
PIPELINE = ("--layout.pipeline=2",)
LEGS = {
    "dense model": (
        (),
        [
            (2, PIPELINE),
            (2, ("--layout.shard=parameters",)),
            (2, (*PIPELINE, "--pipeline.schedule=zbv")),
            (2, ("--layout.context=2",)),
        ],
    ),
    "experts": (
        EXPERTS,
        [
            (2, ("--layout.expert=2",)),
            (4, (*PIPELINE, "--layout.expert=2")),
            (4, ("--layout.expert=4", "--layout.shard=parameters")),
            (2, ("--layout.context=2", "--layout.expert=2")),
        ],
    ),
}
MORE = {
    "dense model on four ranks": (
        (),
        [
            (4, (*PIPELINE, "--pipeline.schedule=interleaved", "--layout.tensor=2")),
            (4, ("--layout.context=2", "--layout.shard=parameters", "--context.method=all-to-all")),
            (4, ("--layout.pipeline=4",)),
            (4, (*PIPELINE, "--layout.context=2")),
        ],
    ),
    "experts on four ranks": (
        EXPERTS,
        [
            (4, (*PIPELINE, "--layout.context=2", "--layout.expert=2")),
            (2, ("--layout.tensor=2",)),
            (4, (*PIPELINE, "--pipeline.schedule=zbv", "--layout.shard=optimizer")),
            (4, ("--layout.shard=parameters", "--layout.shard_degree=2", "--layout.expert=2")),
        ],
    ),
}


LONG = ("experts", *MORE)


@pytest.mark.parametrize("case", ["dense model", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_run_resumed_on_other_layouts_equals_a_run_on_one_rank(case, runs):
    model, legs = (LEGS | MORE)[case]
    for leg, (ranks, options) in enumerate(legs, 1):
        stop = leg * STEPS // len(legs)
        if leg < len(legs):
            with pytest.raises(MeshwrightError, match=f"stopped by signal 15 before step {stop}"):
                runs.run(f"step.fetch:rank{ranks - 1}:term@step{stop}", *EXACT, *model, *options, ranks=ranks)
        else:
            runs.run("", *EXACT, *model, *options, ranks=ranks)
    changes = [change for event in runs.events("restored") for change in event["changes"]]
    assert any(change.startswith("pipeline was") for change in changes)
    assert any(change.startswith("expert was") for change in changes) == bool(model)
    moved, runs.folder = runs.folder, runs.folder.with_name("one rank")
    runs.run("", *EXACT, *model, ranks=1)
    ours, theirs = step_records(moved), step_records(runs.folder)
    assert sorted(ours) == list(range(STEPS))
    for step, record in ours.items():
        for key in ("loss", "grad_norm", "tokens", "lr"):
            # in float64 only the order of the sums differs
            assert record[key] == pytest.approx(theirs[step][key], rel=1e-10), (step, key)
        assert record.get("experts") == theirs[step].get("experts")
    one, other = (list_published(open_run_store(RunFolder(folder)))[0] for folder in (moved, runs.folder))
    for name, record in other.manifest.tensors.items():
        found, wanted = (to_float64(read_full_tensor(entry, name), record.dtype) for entry in (one, other))
        if name.startswith("buffer/"):  # router biases follow the loads, which are integers
            assert np.array_equal(found, wanted), name
        assert np.allclose(found, wanted, rtol=1e-7, atol=1e-12), name
    assert [e.manifest.counters["evaluations"] for e in (one, other)] == [
        pytest.approx(np.array(other.manifest.counters["evaluations"]), rel=1e-10)
    ] * 2
    degrees = list_rows(moved)[0]["layout"]
    for word in legs[-1][1]:
        axis, _, degree = word.removeprefix("--layout.").partition("=")
        assert not degree.isdigit() or axis == "shard_degree" or degrees[axis] == int(degree)


@pytest.mark.long
def test_fork_may_change_layout_and_settings(runs):
    with pytest.raises(MeshwrightError, match="before step 6"):
        runs.run("step.fetch:rank0:term@step6", *EXACT, *PIPELINE)
    runs.run("", *EXACT, "--layout.context=2", "--optimizer.lr=0.001", fork=True)
    assert [row["timeline"] for row in list_rows(runs.folder)][-1] == 1
    assert list_rows(runs.folder)[0]["timeline"] == 2
    assert sorted(step_records(runs.folder)) == list(range(STEPS))
