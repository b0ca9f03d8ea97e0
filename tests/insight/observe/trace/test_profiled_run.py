"""A profiled run of two ranks: who waited for whom, on which axis, in one merged trace."""

from __future__ import annotations

import pytest

import meshwright
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.trace.exposed_time import exposed_by_axis
from meshwright.insight.trace.profile_files import find_profiles
from meshwright.insight.trace.trace_text import write_trace
from tests.insight.observe.trace.trace_format import arrows, check_format, read_trace, slices
from tests.kit.small_run import small_config

PROFILED = [2, 3]
FAULT = "step.forward:rank1:slow=0.4@step2,step.update:rank0:kill@step4"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Rank 1 is late in the forward pass of step 2. Rank 0 is killed in step 4, so that all steps run again."""
    root = tmp_path_factory.mktemp("profiled") / "run"
    config = small_config(
        "--layout.replicate=1",
        "--layout.tensor=2",
        "--profile.steps=2:4,50:60",
        "--checkpoint.mode=off",
        "--eval.every=0",
        steps=5,
        ranks=None,
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MESHWRIGHT_FAULT", FAULT)
        meshwright.train(config, run=root, quiet=True)
    return RunFolder(root)


def test_steps_are_profiled_once_and_marked_in_their_records(run: RunFolder) -> None:
    profiles = find_profiles(run)
    assert [(p.rank, p.attempt, p.steps) for p in profiles] == [(0, 1, range(2, 4)), (1, 1, range(2, 4))]
    assert len(list(run.trace.glob("*.gz"))) == 2
    for rank in (0, 1):
        events = list(read_events(run.events(rank)))
        steps = [event for event in events if event["kind"] == "step"]
        assert [(e["attempt"], e["step"]) for e in steps if e.get("profiled")] == [(1, 2), (1, 3)]
        assert [e["file"] for e in events if e["kind"] == "profile"] == [f"trace/{profiles[rank].path.name}"]
        losses = {(e["attempt"], e["step"]): e["loss"] for e in steps}
        assert [losses[1, step] for step in PROFILED] == [losses[2, step] for step in PROFILED]  # bitwise


def test_exposed_communication_of_profiled_steps_is_divided_among_the_axes(run: RunFolder) -> None:
    recorded = {
        (event["rank"], event["step"]): event["communication"]["exposed_seconds"]
        for rank in (0, 1)
        for event in read_events(run.events(rank))
        if event["kind"] == "step" and event.get("profiled")
    }
    exposed = {(item.rank, item.step): item for item in exposed_by_axis(run)}
    assert set(exposed) == set(recorded) == {(rank, step) for rank in (0, 1) for step in PROFILED}
    for key, item in exposed.items():
        assert item.total == pytest.approx(recorded[key], abs=1e-3)  # spans are in whole microseconds
    waiting, late = exposed[0, 2].seconds, exposed[1, 2].seconds
    assert max(waiting, key=lambda axis: waiting[axis]) == "tensor"
    assert waiting["tensor"] > late["tensor"]


def test_merged_trace_names_the_rank_that_was_waited_for(run: RunFolder) -> None:
    summary = write_trace(run.root)
    assert not summary.notes
    assert "tensor" in summary.exposed_seconds
    events = read_trace(run.merged_trace)
    check_format(events)
    collectives = [e for e in slices(events, "collectives: tensor", 0) if e["args"]["step"] == 2]
    longest = max(collectives, key=lambda event: event["dur"])
    assert longest["args"]["last rank"] == 1
    pairs = {(e["args"]["group"], e["args"]["sequence"]) for e in slices(events, "collectives", 1)}
    assert (longest["args"]["group"], longest["args"]["sequence"]) in pairs
    inside = longest["ts"], longest["ts"] + longest["dur"]
    assert any((a["pid"], b["pid"]) == (1, 0) and inside[0] <= b["ts"] <= inside[1] for a, b in arrows(events))
    assert {e["name"] for e in events if e["name"].startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert {e["pid"] for e in events if e["name"] == "aten::mm"} == {0, 1}
