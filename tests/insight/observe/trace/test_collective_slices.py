"""Collectives of a profile get their process group: from kernels of NCCL, or from what was recorded for Gloo."""

from __future__ import annotations

from typing import Any

from meshwright.base.records.span_reader import PhaseSpan, RankPlace, StepSpanRecord
from meshwright.insight.trace.collective_slices import CollectiveMatcher, CollectiveSlice
from meshwright.insight.trace.exposed_time import exposed_on_device, exposed_on_host, intervals
from meshwright.insight.trace.profile_files import ProfileHead, RecordedCollective

AXES = {"1": "tensor", "2": "replicate"}


def match(recorded: list[RecordedCollective], events: list[dict[str, Any]]) -> list[CollectiveSlice]:
    matcher = CollectiveMatcher(ProfileHead(RankPlace(0), 0.0, AXES, recorded))
    for event in events:
        matcher.add(event)
    return matcher.slices()


def gloo(collective: str, begin: float, end: float, thread: int) -> dict[str, Any]:
    return {"ph": "X", "name": f"gloo:{collective}", "ts": begin, "dur": end - begin, "tid": thread}


def kernel(name: str, begin: float, end: float, group: str) -> dict[str, Any]:
    args = {"Collective name": name, "Process Group Name": group, "In msg nelems": 8}
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": begin, "dur": end - begin, "args": args}


def test_executions_of_gloo_are_matched_by_group_although_groups_complete_out_of_order() -> None:
    recorded = [
        RecordedCollective(7, "0", 40, "all_reduce", 1000, 10),  # the step control vector: completed last
        RecordedCollective(7, "1", 5, "all_reduce", 3000, 64),
        RecordedCollective(7, "1", 6, "all_gather", 5000, 32),
        RecordedCollective(7, "2", 9, "all_reduce", 6000, 128),
    ]
    events = [
        gloo("all_reduce", 6010, 9000, thread=30),
        gloo("all_reduce", 1020, 8000, thread=10),
        gloo("all_reduce", 3010, 4000, thread=20),
        gloo("all_gather", 5010, 5500, thread=20),
        {"ph": "X", "cat": "cpu_op", "name": "c10d::_reduce_scatter_base_", "ts": 2990, "dur": 50},
        {"ph": "X", "name": None, "ts": "x"},
    ]
    found = [(item.axis, item.sequence, item.collective, item.begin, item.end) for item in match(recorded, events)]
    assert found == [
        ("control", 40, "all_reduce", 1000, 8000),
        ("tensor", 5, "reduce_scatter", 3000, 4000),  # Gloo executes it as an all-reduce
        ("tensor", 6, "all_gather", 5000, 5500),
        ("replicate", 9, "all_reduce", 6000, 9000),
    ]


def test_kernels_of_nccl_are_numbered_by_group_and_messages_are_not_linked() -> None:
    events = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#5", "ts": 0, "dur": 100},
        kernel("_reduce_scatter_base", 30, 40, "1"),
        kernel("allreduce", 20, 60, "2"),
        kernel("_allgather_base", 10, 20, "1"),
        kernel("send", 70, 80, "1"),
    ]
    slices = match([], events)
    assert [(item.axis, item.sequence, item.collective, item.step) for item in slices] == [
        ("tensor", 0, "all_gather", 5),
        ("replicate", 0, "all_reduce", 5),
        ("tensor", 1, "reduce_scatter", 5),
        ("tensor", 2, "send", 5),
    ]
    assert [len(item.call) for item in slices] == [3, 3, 3, 4]  # a message has its rank as well


def test_wait_belongs_to_the_collective_that_was_called_last_and_completed_in_it() -> None:
    slices = match(
        [RecordedCollective(0, "0", 1, "all_reduce", 0, 10), RecordedCollective(0, "1", 1, "all_reduce", 100, 10)],
        [gloo("all_reduce", 10, 890, thread=1), gloo("all_reduce", 110, 880, thread=2)],
    )
    phases = (PhaseSpan("forward", 0, 1000), PhaseSpan("sync", 1000, 1500), PhaseSpan("update", 1500, 1600))
    place = RankPlace(0, coordinates={"tensor": 0, "replicate": 1})
    step = StepSpanRecord(place, 1, 0, phases, ((120, 900), (1000, 1400)))
    seconds = {axis: round(value * 1e6) for axis, value in exposed_on_host(step, slices).seconds.items()}
    assert seconds == {"tensor": 780, "control": 500}
    pipeline = StepSpanRecord(RankPlace(0, coordinates={"pipeline": 0}), 1, 0, phases, ((1000, 1400),))
    assert list(exposed_on_host(pipeline, []).seconds) == ["pipeline"]


def test_communication_on_a_device_is_exposed_while_no_other_kernel_runs() -> None:
    step = StepSpanRecord(RankPlace(0), 1, 0, (PhaseSpan("forward", 0, 1000),), ())
    communication = [
        (100.0, 300.0, "shard"),
        (200.0, 400.0, "shard"),
        (500.0, 600.0, "tensor"),
        (2000.0, 2100.0, "tensor"),
    ]
    exposed = exposed_on_device(step, communication, intervals([(150.0, 350.0), (500.0, 700.0)]))
    assert {axis: round(seconds * 1e6) for axis, seconds in exposed.seconds.items()} == {"shard": 100, "tensor": 0}
