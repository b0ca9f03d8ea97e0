"""The breakdown of a trace: compute, communication, overlap, copies and the causes of idle time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.insight.diagnose.trace.breakdown import Breakdown, RankTimeline, make_timeline
from meshwright.insight.diagnose.trace.collective_calls import collective_calls
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.kineto_trace import read_trace
from tests.insight.diagnose.synthetic_traces import RocmTraceBuilder, TraceBuilder, training_trace


def timeline_of(trace: TraceBuilder, folder: Path) -> RankTimeline:
    return make_timeline(read_trace(trace.write(folder / "trace.json.gz")))


def breakdown_of(trace: TraceBuilder, folder: Path) -> Breakdown:
    timeline = timeline_of(trace, folder)
    return timeline.breakdown(*timeline.window)


@pytest.mark.parametrize("builder", [TraceBuilder, RocmTraceBuilder])
def test_shares_of_overlapping_activities(tmp_path: Path, builder: type[TraceBuilder]) -> None:
    """Three measured steps: 600 us of compute, 300 us of communication, 100 us of it overlapped, 200 us idle."""
    trace = training_trace(3, builder=builder)
    trace.kernel("Memcpy HtoD (Host -> Device)", 100, 10, launch=15)  # the launch of a copy is recorded in another form
    parts = breakdown_of(trace, tmp_path)
    microseconds = {name: round(value * 1e6) for name, value in parts.to_json().items() if name != "idle_causes"}
    assert microseconds == {
        "seconds": 2800,
        "compute": 1800,
        "communication": 900,
        "overlapped": 300,
        "exposed": 600,
        "memory": 0,
        "idle": 400,
    }
    assert parts.overlap == pytest.approx(1 / 3)
    assert sum(parts.idle_causes.values()) == pytest.approx(parts.idle)


def test_the_last_step_and_earlier_launches_are_left_out(tmp_path: Path) -> None:
    trace = training_trace(1)
    trace.add("kernel", "launched before the trace", 0, 50, 7, correlation=10**6)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.window == (100, 900)
    assert list(timeline.steps) == [0]


def test_activities_without_a_launch_are_counted(tmp_path: Path) -> None:
    """Those launched before the trace are left out. If most have none, they count in the step that they are in."""
    trace = training_trace(3)
    trace.kernel("gemm", 90, 5, launch=50)
    trace.add("kernel", "launched before the trace", 0, 50, 7, correlation=10**6)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.window[0] == 90
    assert timeline.trace.notes == ["1 of 14 kernels and copies have no launch, and are left out"]
    for event in trace.events:
        if event["cat"] == "kernel" and event["ts"] != 90:
            event["args"].pop("correlation")
    timeline = timeline_of(trace, tmp_path)
    assert timeline.trace.notes == [
        "13 of 14 kernels and copies have no launch, and count in the step in which they start"
    ]
    assert list(timeline.steps) == [0, 1, 2]
    parts = timeline.breakdown(*timeline.window)
    assert parts.compute == pytest.approx(1855e-6)
    assert parts.idle_causes["launch"] == 0
    assert parts.idle_causes["unknown launch"] > 0


@pytest.mark.parametrize("name", ["CopyHostToDevice", "FillBuffer", "__amd_rocclr_copyBuffer.kd"])
def test_copies_that_rocm_records_as_kernels_are_copies(tmp_path: Path, name: str) -> None:
    trace = RocmTraceBuilder()
    trace.kernel("gemm", 0, 100)
    trace.kernel(name, 100, 50)
    parts = breakdown_of(trace, tmp_path)
    assert (parts.compute, parts.memory) == pytest.approx((100e-6, 50e-6))


def test_steps_have_breakdowns_that_add_up(tmp_path: Path) -> None:
    timeline = timeline_of(training_trace(4), tmp_path)
    steps = [timeline.breakdown(*window) for window in timeline.steps.values()]
    whole = timeline.breakdown(*timeline.window)
    assert list(timeline.steps) == [0, 1, 2, 3]
    for part in ("seconds", "compute", "exposed", "memory", "idle"):
        assert sum(getattr(step, part) for step in steps) == pytest.approx(getattr(whole, part))


COMMUNICATION = [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", {}),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", {}),
    ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*, long*)", {}),
    ("deep_ep::internode_ll::combine", {}),
    ("rcclGenericKernel", {}),
    ("void mscclpp::collective::allreduceKernel<float>", {}),
    ("nvshmemi_transfer_put", {}),
    (
        "my_exchange_kernel",
        {"Collective name": "alltoallv", "In msg nelems": 4096, "dtype": "BFloat16", "Group size": 8},
    ),
]


@pytest.mark.parametrize(("name", "args"), COMMUNICATION, ids=[name[:24] for name, _ in COMMUNICATION])
def test_communication_is_found_by_name_or_metadata(tmp_path: Path, name: str, args: dict[str, object]) -> None:
    trace = TraceBuilder()
    trace.kernel("gemm", 0, 100)
    trace.kernel(name, 50, 100, **args)
    parts = breakdown_of(trace, tmp_path)
    assert parts.communication == pytest.approx(100e-6)
    assert parts.overlapped == pytest.approx(50e-6)


def test_kernels_on_a_stream_of_communication_belong_to_it(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.kernel("gemm", 0, 100)
    trace.collective("AllGather", 100, 95)
    trace.kernel("anonymous_kernel", 195, 5, stream=20)
    assert breakdown_of(trace, tmp_path).communication == pytest.approx(100e-6)


def test_metadata_of_collectives(tmp_path: Path) -> None:
    trace = TraceBuilder()
    metadata = {"Collective name": "_reduce_scatter_base", "In msg nelems": 1000, "dtype": "BFloat16", "Group size": 4}
    metadata |= {"Process Group Name": "3", "Process Group Description": "mesh_shard", "Seq": 5}
    trace.collective("ReduceScatter", 0, 10, **metadata)
    calls = collective_calls(timeline_of(trace, tmp_path))
    assert (calls.kind, calls.group, calls.axis, calls.sequence) == (["reduce-scatter"], ["3"], ["shard"], [5])
    assert calls.message_bytes.tolist() == [2000]


def test_a_kernel_has_the_kind_and_size_of_the_annotation_that_launched_it(tmp_path: Path) -> None:
    """The kernel of an all-to-all is called SendRecv."""
    trace = TraceBuilder()
    trace.add("user_annotation", "nccl:all_to_all", 0, 20, **{"Input Dims": [[8, 32]], "Input type": ["c10::Half"]})
    trace.collective("SendRecv", 50, 10, launch=10)
    trace.collective("SendRecv", 90, 10, launch=80)
    calls = collective_calls(timeline_of(trace, tmp_path))
    assert calls.kind == ["all-to-all", "send/recv"]
    assert calls.message_bytes.tolist() == [512, 0]


def test_a_kernel_has_the_metadata_of_the_operator_that_launched_it(tmp_path: Path) -> None:
    """As torch 2.11 records it: the annotation within the operator has no metadata."""
    trace = TraceBuilder(meshwright={"axes": {"3": "replicate"}})
    metadata = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Process Group Name": "3"}
    trace.add("cpu_op", "record_param_comms", 0, 30, **metadata, **{"In split size": "[]"})
    trace.add("user_annotation", "nccl:all_reduce", 5, 20)
    trace.collective("AllReduce_Sum_f32", 50, 10, launch=10)
    calls = collective_calls(timeline_of(trace, tmp_path))
    assert (calls.kind, calls.group, calls.axis) == (["all-reduce"], ["3"], ["replicate"])
    assert calls.message_bytes.tolist() == [40]


def test_the_axis_of_a_run_of_meshwright(tmp_path: Path) -> None:
    """Annotations of Gloo name no process group; the metadata of the run lists its collectives in order."""
    rows = [[0, "5", 7, "all_reduce", 0, 100], [0, "6", 1, "all_reduce", 10, 50]]
    trace = TraceBuilder(device=False, meshwright={"axes": {"5": "replicate", "6": "tensor"}, "collectives": rows})
    trace.add("cpu_op", "aten::mm", 0, 10)
    trace.add("user_annotation", "gloo:all_reduce", 20, 10, 2)
    trace.add("user_annotation", "gloo:all_reduce", 40, 10, 2)
    calls = collective_calls(timeline_of(trace, tmp_path))
    assert calls.axis == ["replicate", "tensor"]
    assert calls.sequence == [7, 1]
    assert calls.message_bytes.tolist() == [400, 200]


def test_idle_time_has_a_cause(tmp_path: Path) -> None:
    """One idle interval of each cause, in powers of two."""
    trace = TraceBuilder()
    trace.kernel("k", 0, 100, launch=-5)
    trace.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 16)
    trace.kernel("k", 116, 100, launch=115)
    trace.add("cuda_runtime", "cudaMalloc", 216, 32)
    trace.kernel("k", 248, 100, launch=247)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 300, 50)
    trace.kernel("k", 412, 100, launch=400)
    trace.kernel("k", 640, 100, launch=600)
    trace.kernel("k", 996, 100, launch=650)
    parts = breakdown_of(trace, tmp_path)
    assert {cause: round(seconds * 1e6) for cause, seconds in parts.idle_causes.items()} == {
        "loader": 16,
        "allocation": 32,
        "collective issue": 0,
        "synchronization": 64,
        "launch": 128,
        "dependency": 256,
    }


def test_a_trace_without_a_device_has_operators_as_compute(tmp_path: Path) -> None:
    trace = TraceBuilder(device=False)
    trace.add("cpu_op", "aten::mm", 0, 100)
    trace.add("cpu_op", "aten::copy_", 20, 10)
    trace.add("cpu_op", "c10d::allreduce_", 100, 10)
    trace.add("user_annotation", "gloo:all_reduce", 105, 95, 2)
    trace.add("cpu_op", "aten::add_", 150, 50)
    trace.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 210, 40)
    trace.add("cpu_op", "aten::stack", 215, 30)
    trace.add("cpu_op", "aten::mm", 260, 40)
    parts = breakdown_of(trace, tmp_path)
    assert parts.compute == pytest.approx(190e-6)
    assert parts.communication == pytest.approx(95e-6)
    assert parts.overlapped == pytest.approx(50e-6)
    assert parts.idle_causes["loader"] == pytest.approx(40e-6)
    assert parts.idle_causes["outside operators"] == pytest.approx(25e-6)
    assert sum(parts.idle_causes.values()) == pytest.approx(parts.idle)


def test_interval_sets_agree_with_sets_of_integers() -> None:
    random = np.random.default_rng(3)

    def draw() -> tuple[Intervals, set[int]]:
        start = random.integers(0, 100, 12).astype(float)
        end = start + random.integers(0, 12, 12)
        covered = {n for a, b in zip(start, end, strict=True) for n in range(int(a), int(b))}
        return Intervals.union(start, end), covered

    for _ in range(50):
        (first, a), (second, b) = draw(), draw()
        assert first.total == len(a)
        assert (first & second).total == len(a & b)
        assert (first | second).total == len(a | b)
        assert (first - second).total == len(a - b)
        assert first.gaps(0, 120).total == 120 - len(a)
        assert first.clip(20, 70).total == len({n for n in a if 20 <= n < 70})
        assert first.overlap_with(second).sum() == len(a & b)
        assert first.contains(np.arange(120.0)).tolist() == [n in a for n in range(120)]
