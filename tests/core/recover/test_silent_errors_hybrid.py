"""Silent errors in pipeline, context and expert parallel runs."""

from __future__ import annotations

import pytest

from meshwright import train
from meshwright.core.data.sample_lookup import open_sample_lookup
from meshwright.errors import MeshwrightError
from tests.core.recover.recovery_runs import FaultySource, config

EXPERTS = ("--model.experts=4", "--layout.expert=2")
PIPELINE = ("--layout.pipeline=2", "--batch.micro=4")
LAYOUTS = {
    "pipeline": PIPELINE,
    "ring": ("--layout.context=2",),
    "experts": EXPERTS,
    "zbv": (*PIPELINE, "--pipeline.schedule=zbv", "--model.layers=4"),
    "pipeline x experts": (*PIPELINE, *EXPERTS),
    "pipeline x ring": (*PIPELINE, "--layout.context=2"),
}
WILD = ("--optimizer.lr=5e18", "--schedule.warmup=0", "--checkpoint.mode=off", "--eval.every=0")
RANKS = {"pipeline x experts": 4, "pipeline x ring": 4}


@pytest.mark.parametrize(
    "layout", [*list(LAYOUTS)[:3], *(pytest.param(n, marks=pytest.mark.long) for n in list(LAYOUTS)[3:])]
)
def test_first_nonfinite_module_is_found(layout, runs):
    """After one update with such a learning rate the products of queries and keys overflow."""
    with pytest.raises(
        MeshwrightError, match=r"step [123]: loss nan or its gradient is not finite, first in "
    ) as stopped:
        runs.run("", *LAYOUTS[layout], *WILD, ranks=RANKS.get(layout, 2))
    assert stopped.value.exit_code == 7
    messages = [event for rank in range(RANKS.get(layout, 2)) for event in runs.events("nonfinite", rank)]
    assert len(messages) == RANKS.get(layout, 2)
    assert any("decoder." in (event["module"] or "") for event in messages), messages


@pytest.mark.parametrize("options", [EXPERTS[:1], pytest.param(EXPERTS, marks=pytest.mark.long)])
def test_search_for_nonfinite_modules_does_not_count_expert_loads(options, runs):
    """Every step from the second on is skipped and searched for the non-finite module in an extra pass."""
    wild = (*WILD, "--numerics.on_nonfinite=skip", "--numerics.skip_budget=100", "--log_every=1")
    assert runs.run("", *options, *wild).skipped > 5
    loads = [event["loads"] for event in runs.events("experts")]
    assert {sum(block) for step in loads for block in step} == {16 * 16 * 2}  # each token is routed to two experts


@pytest.mark.parametrize("layout", ["pipeline", "ring", pytest.param("pipeline x ring", marks=pytest.mark.long)])
def test_bad_sample_is_reported_by_every_rank_that_reads_it(layout, runs):
    ranks = RANKS.get(layout, 2)

    def go(bad: int, policy: str):
        run_config = config(*LAYOUTS[layout], "--eval.every=0", f"--data.on_bad_sample={policy}", ranks=ranks)
        return train(run_config, run=runs.folder, quiet=True, source=FaultySource({bad: "raises"}))

    go(-1, "stop")
    shown = [[int(s) for s in open_sample_lookup(runs.folder).show(7, rank)["samples"]] for rank in range(ranks)]
    assert all(samples == shown[0] for samples in shown)  # stages and sequence chunks read the same samples
    bad = shown[0][5]
    runs.folder = runs.folder.with_name("poisoned")
    with pytest.raises(MeshwrightError, match=rf"step 7.*sample {bad}\b.*no such encoding") as stopped:
        go(bad, "stop")
    assert len(runs.incidents) == 1
    assert stopped.value.exit_code == 6
    runs.folder = runs.folder.with_name("quarantined")
    go(bad, "quarantine")
    for rank in range(ranks):
        assert [(e["step"], e["sample"]) for e in runs.events("bad_sample", rank)] == [(7, bad)]
        records = {e["step"]: e["tokens"] for e in runs.events("step", rank)}
        assert records[7] == records[6] - 16  # counted once, however many ranks read it


@pytest.mark.parametrize(
    ("options", "rank", "ranks"),
    [
        ((*PIPELINE, "--batch.global=24"), 4, 6),  # the second stage of the second of three replicas
        pytest.param(EXPERTS, 2, 4, marks=pytest.mark.long),
        pytest.param((*PIPELINE, *EXPERTS), 3, 4, marks=pytest.mark.long),
    ],
)
def test_flipped_bit_names_the_differing_rank(options, rank, ranks, runs):
    with pytest.raises(MeshwrightError, match="replicas hold different parameters"):
        runs.run(
            f"step.fetch:rank{rank}:flip@step2",
            *options,
            "--numerics.compare_every=1",
            "--launch.restarts=0",
            ranks=ranks,
        )
    incident = runs.incidents[0]
    alike = 3 if ranks == 6 else 4 if "--layout.pipeline=2" not in options else 2
    assert (incident.error_type, incident.step) == ("ReplicaError", 2)
    message = f"rank {rank} differs from the {alike} replicas" if alike > 2 else "all differ among the 2 replicas"
    assert message in incident.message
    assert "first in decoder." in incident.message
