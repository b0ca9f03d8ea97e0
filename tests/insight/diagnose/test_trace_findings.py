"""The causes that traces show: the first finding names the injected one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.base.config import load_config
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import CAUSES, Finding
from meshwright.insight.diagnose.trace.diagnose import TraceDiagnosis, diagnose_traces
from meshwright.planner.report.change_cost import change_settings
from tests.insight.diagnose.synthetic_traces import RocmTraceBuilder, TraceBuilder

STEPS = 5
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def diagnose(folder: Path, *traces: TraceBuilder) -> TraceDiagnosis:
    return diagnose_traces([trace.write(folder / f"trace-{n}.json") for n, trace in enumerate(traces)])


def make_trace(
    add_step: Callable[[TraceBuilder, float], None], length: float = 10_000.0, rank: int = 0, **options: object
) -> TraceBuilder:
    """A trace of STEPS measured steps and an incomplete one, each with the activities that `add_step` adds."""
    trace = TraceBuilder(rank, **options)  # type: ignore[arg-type]
    for step in range(STEPS + 1):
        trace.step(step, step * length, length - 10)
        add_step(trace, step * length)
    return trace


def compute(trace: TraceBuilder, begin: float, end: float, kernels: int = 10) -> None:
    """Kernels without gaps that are launched in advance."""
    length = (end - begin) / kernels
    for number in range(kernels):
        trace.kernel("gemm", begin + number * length, length, launch=begin - 50 + number)


def first(diagnosis: TraceDiagnosis) -> tuple[str, str]:
    finding = diagnosis.findings[0]
    assert finding.cause in CAUSES
    assert 0 <= finding.share <= 1
    assert finding.check == "meshwright diagnose TRACE"
    assert finding.cause == "healthy" or (finding.evidence and (finding.change.action or finding.change.settings))
    return finding.cause, finding.variant


def test_a_device_that_computes_all_the_time_is_healthy(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path, make_trace(lambda trace, begin: compute(trace, begin + 100, begin + 10_050)))
    assert first(diagnosis) == ("healthy", "")
    assert len(diagnosis.findings) == 1


def test_time_that_no_cause_explains_is_not_judged(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        compute(trace, begin, begin + 4000)
        trace.kernel("Memcpy HtoD", begin + 4000, 6000, launch=begin)

    diagnosis = diagnose(tmp_path, make_trace(step))
    assert first(diagnosis) == ("not judged", "time without a cause")
    assert diagnosis.findings[0].sentence == (
        "not judged: rank 0 spends 56% of the time on what no finding explains (copies 56%)."
    )
    assert diagnosis.findings[0].share_text == "56% of the time is not explained"


def test_time_that_no_cause_explains_follows_what_was_found(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        trace.add("user_annotation", LOADER, begin, 900)
        compute(trace, begin + 1000, begin + 4000)
        trace.kernel("Memcpy HtoD", begin + 4000, 6000, launch=begin + 950)

    assert [one.cause for one in diagnose(tmp_path, make_trace(step)).findings] == ["data", "not judged"]


@pytest.mark.parametrize("loader", [0, 300])
def test_small_finding_does_not_explain_exposed_communication(tmp_path: Path, loader: int) -> None:
    """The all-gather overlaps all compute and is exposed beyond it, which no overlap could mend."""

    def step(trace: TraceBuilder, begin: float) -> None:
        if loader:
            trace.add("user_annotation", LOADER, begin, loader)
        begin += loader
        trace.kernel("ncclDevKernel_AllGather_RING_LL", begin, 5600, begin - 60 * (not loader), 20)
        for number in range(10):
            trace.kernel("gemm", begin + 200 + number * 400, 400, begin - 50 * (not loader) + number)

    findings = diagnose(tmp_path, make_trace(step, length=5600 + loader)).findings
    assert [one.cause for one in findings] == ["data"] * bool(loader) + ["not judged"]
    assert "exposed communication" in findings[-1].sentence
    assert "idle" not in findings[-1].sentence


@pytest.mark.parametrize("launches", [True, False])
def test_calls_of_the_runtime_tell_that_a_program_on_gloo_uses_a_device(tmp_path: Path, launches: bool) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        trace.add("cpu_op", "aten::mm", begin, 5_000)
        if launches:
            trace.add("cuda_runtime", "cudaLaunchKernel", begin + 10, 5, correlation=int(begin))

    trace = make_trace(step)
    trace.header["distributedInfo"]["backend"] = "gloo"
    assert [rank.is_judged for rank in diagnose(tmp_path, trace).ranks] == [not launches]


@pytest.mark.parametrize("device", [True, False])
def test_trace_without_device_events_is_never_healthy(tmp_path: Path, device: bool) -> None:
    """Of a program that uses a device, the operators of the host show no cause at all."""

    def step(trace: TraceBuilder, begin: float) -> None:
        trace.add("cpu_op", "aten::mm", begin, 5_000 if device else 10_000)

    diagnosis = diagnose(tmp_path, make_trace(step, device=device))
    assert first(diagnosis) == ("not judged", "no device events")
    assert len(diagnosis.findings) == 1
    assert diagnosis.findings[0].sentence == "not judged: the trace has no device events (rank 0)."
    assert [rank.is_judged for rank in diagnosis.ranks] == [not device]


def test_rank_without_device_events_is_named_beside_the_others(tmp_path: Path) -> None:
    blind = TraceBuilder(1)
    blind.add("cpu_op", "aten::mm", 0, 10)
    diagnosis = diagnose(tmp_path, make_trace(COMMUNICATION["one bucket"]), blind)
    assert (first(diagnosis), diagnosis.findings[0].rank) == (("not judged", "no device events"), 1)


def test_collectives_of_rccl_are_named_by_their_annotation(tmp_path: Path) -> None:
    trace = RocmTraceBuilder()
    for step in range(STEPS + 1):
        begin = 10_000.0 * step
        trace.step(step, begin, 9990)
        compute(trace, begin, begin + 6000)
        trace.add("user_annotation", "nccl:all_reduce", begin + 10, 10)
        trace.kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", begin + 6000, 4000, begin + 15, 20)
    diagnosis = diagnose(tmp_path, trace)
    assert first(diagnosis) == ("communication", "one bucket")
    assert "1 all-reduce call per step" in diagnosis.findings[0].sentence


@pytest.mark.parametrize("loader", ["_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"])
@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])
def test_data_bound(tmp_path: Path, loader: str, category: str) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        trace.add(category, f"enumerate(DataLoader)#{loader}.__next__", begin, 4000)
        compute(trace, begin + 4100, begin + 10_000)

    finding = diagnose(tmp_path, make_trace(step)).findings[0]
    assert (finding.cause, finding.variant, finding.confidence) == ("data", "loader", "high")
    assert finding.share == pytest.approx(0.33, abs=0.05)
    assert ("num_workers=4" in finding.change.action) == loader.startswith("_Single")


def test_a_loader_that_works_while_the_device_computes_is_no_cause(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        trace.add("user_annotation", LOADER, begin + 200, 6000)
        compute(trace, begin + 100, begin + 10_050)

    assert first(diagnose(tmp_path, make_trace(step))) == ("healthy", "")


def gradients(
    number: int, length: float, gap: float, compute_until: float, begin_at: float, **args: object
) -> Callable[[TraceBuilder, float], None]:
    def step(trace: TraceBuilder, begin: float) -> None:
        compute(trace, begin + 50, begin + compute_until)
        for index in range(number):
            start = begin + begin_at + index * (length + gap)
            trace.collective("AllReduce", start, length, **args)

    return step


SMALL = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
LARGE = {"Collective name": "allreduce", "In msg nelems": 50_000_000, "dtype": "Float"}
COMMUNICATION = {
    "not bucketed": gradients(100, 10, 30, 6000, 6000),
    "not bucketed, with sizes": gradients(100, 10, 30, 6000, 6000, **SMALL),
    "small buckets": gradients(60, 100, 0, 6000, 2000, **SMALL),
    "one bucket": gradients(1, 4000, 0, 6000, 6000, **LARGE),
    "late start": gradients(8, 500, 0, 6000, 6000, **LARGE),
    "partial overlap": gradients(8, 900, 0, 6000, 2500, **LARGE),
    "slow link": gradients(6, 1500, 0, 1000, 1000, **LARGE),
}


@pytest.mark.parametrize("name", COMMUNICATION)
def test_exposed_all_reduces(tmp_path: Path, name: str) -> None:
    finding = diagnose(tmp_path, make_trace(COMMUNICATION[name])).findings[0]
    assert (finding.cause, finding.variant) == ("communication", name.partition(",")[0])
    assert "all-reduce" in finding.sentence
    assert 0.2 < finding.share < 0.5
    sizes = [figure.value for figure in finding.evidence if figure.figure.startswith("median message")]
    assert sizes == ([4000.0] if "sizes" in name or name == "small buckets" else sizes)


@pytest.mark.parametrize(
    ("name", "kind", "axes", "expected"),
    [
        ("late start", "AllReduce", "replicate", ("ddp.bucket_cap_mb = 25.0",)),
        ("one bucket", "AllReduce", "replicate", ("ddp.bucket_cap_mb = 23.8",)),
        ("small buckets", "AllReduce", "replicate", ("ddp.bucket_cap_mb = 25.0",)),
        ("partial overlap", "AllReduce", "replicate", ()),
        ("late start", "AllReduce", "tensor", ()),
        ("partial overlap", "AllGather", "shard", ("fsdp.prefetch = 2",)),
        ("partial overlap", "ReduceScatter", "shard", ()),
        ("partial overlap", "AllGather", "tensor", ()),
    ],
)
def test_settings_fit_the_collective_and_its_axis(
    tmp_path: Path, name: str, kind: str, axes: str, expected: tuple[str, ...]
) -> None:
    """DDP has no prefetching, prefetching hides all-gathers alone, and tensor parallelism has no setting."""
    size = SMALL if name == "small buckets" else LARGE
    args = size | {"Collective name": kind.lower(), "Process Group Name": "3"}
    shapes = {"late start": (8, 500, 0, 6000, 6000), "one bucket": (1, 4000, 0, 6000, 6000)}
    shapes |= {"small buckets": (60, 100, 0, 6000, 2000), "partial overlap": (8, 900, 0, 6000, 2500)}
    number, length, gap, until, begin_at = shapes[name]

    def step(trace: TraceBuilder, begin: float) -> None:
        compute(trace, begin + 50, begin + until)
        for index in range(number):
            trace.collective(kind, begin + begin_at + index * (length + gap), length, **args)

    finding = diagnose(tmp_path, make_trace(step, meshwright={"axes": {"3": axes}})).findings[0]
    assert (finding.variant, finding.axis) == (name, axes)
    assert finding.change.settings == expected
    change_settings(load_config(overrides=["--layout.shard=parameters"] if axes == "shard" else [], ranks=2), expected)


def test_all_reduce_of_hybrid_sharding_gets_no_setting_of_ddp(tmp_path: Path) -> None:
    trace = make_trace(gradients(8, 500, 0, 6000, 6000, **LARGE | {"Process Group Name": "3"}))
    trace.header["meshwright"] = {"axes": {"3": "replicate", "4": "shard"}}
    assert diagnose(tmp_path, trace).findings[0].change.settings == ()


def test_collectives_between_computations_do_not_overlap(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        for index in range(10):
            compute(trace, begin + 1000 * index, begin + 1000 * index + 600, 1)
            trace.collective("AllGather", begin + 1000 * index + 600, 400, launch=begin + 1000 * index)

    finding = diagnose(tmp_path, make_trace(step)).findings[0]
    assert (finding.cause, finding.variant) == ("communication", "no overlap")
    assert "all-gather" in finding.sentence


def test_settings_of_a_run_file_are_not_given_for_other_programs(tmp_path: Path) -> None:
    trace = make_trace(COMMUNICATION["one bucket"])
    assert diagnose(tmp_path, trace).findings[0].change.settings == ()


@pytest.mark.parametrize(("length", "variant"), [(5, "small kernels"), (40, "host-bound launch")])
def test_a_host_that_launches_too_slowly(tmp_path: Path, length: float, variant: str) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        for index in range(100):
            start = begin + 100 * index
            trace.kernel("elementwise", start, length, launch=start - 3)

    assert first(diagnose(tmp_path, make_trace(step))) == ("device", variant)


def test_synchronizing_calls(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        for index in range(10):
            start = begin + 1000 * index
            compute(trace, start, start + 600, 1)
            trace.add("cuda_runtime", "cudaStreamSynchronize", start + 10, 595)

    finding = diagnose(tmp_path, make_trace(step)).findings[0]
    assert (finding.cause, finding.variant) == ("device", "synchronization")
    assert "cudaStreamSynchronize" in finding.sentence


def test_unaligned_matrix_products(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        trace.kernel("cutlass_80_tensorop_f16_s16816gemm_f16_64x64_nn_align1", begin + 50, 10_000, launch=begin + 1)

    assert first(diagnose(tmp_path, make_trace(step))) == ("device", "shapes")


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "hipMalloc"])
def test_memory_is_allocated_during_steps(tmp_path: Path, call: str) -> None:
    def step(trace: TraceBuilder, begin: float) -> None:
        for index in range(10):
            start = begin + 1000 * index
            compute(trace, start, start + 500, 1)
            trace.add("cuda_runtime", call, start + 500, 490)

    assert first(diagnose(tmp_path, make_trace(step))) == ("memory", "allocation")


def replicated(delays: list[float], part: str, device: bool = True, occasional: bool = False) -> list[TraceBuilder]:
    """Ranks that compute 6,000 us and then reduce; rank r begins its all-reduce `delays[r]` us later than the first."""
    traces = []
    for rank, delay in enumerate(delays):

        def step(trace: TraceBuilder, begin: float, delay: float = delay) -> None:
            late = delay if not occasional or begin == 20_000 else 0
            ready = begin + 6000 + late
            if part == "fetch":
                trace.add("user_annotation", LOADER, begin, late)
                compute(trace, begin + late, ready)
            elif part == "compute":
                compute(trace, begin, ready)
            else:
                compute(trace, begin, begin + 6000)
            end = begin + 9900 + 100
            trace.collective("AllReduce", ready, end - ready, launch=begin + 10, **LARGE)

        traces.append(make_trace(step, rank=rank))
    return traces


@pytest.mark.parametrize("part", ["fetch", "compute", "host"])
def test_a_straggler_is_named_with_what_it_does(tmp_path: Path, part: str) -> None:
    diagnosis = diagnose(tmp_path, *replicated([0, 20, 2500, 10], part))
    finding = next(finding for finding in diagnosis.findings if finding.cause == "straggler")
    assert (finding.rank, finding.variant, finding.phase) == (2, "steady", part)
    assert finding.share == pytest.approx(0.25, abs=0.03)
    assert diagnosis.findings[0] == finding
    communication = [other for other in diagnosis.findings if other.cause == "communication"]
    assert [other.share for other in communication] == [pytest.approx(0.14, abs=0.02)], "the rest of the all-reduce"


def test_a_straggler_that_is_slow_now_and_then(tmp_path: Path) -> None:
    findings = diagnose(tmp_path, *replicated([0, 2500, 0], "compute", occasional=True)).findings
    straggler = next(finding for finding in findings if finding.cause == "straggler")
    assert (straggler.rank, straggler.variant) == (1, "now and then")


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    causes = {finding.cause for finding in diagnose(tmp_path, *replicated([0, 0, 0], "compute")).findings}
    assert causes == {"communication"}


def pipeline(stages: list[float]) -> list[TraceBuilder]:
    """Stages that compute two micro-batches of `stages[r]` us each, and wait in receive in between."""
    traces = []
    for rank, length in enumerate(stages):

        def step(trace: TraceBuilder, begin: float, length: float = length) -> None:
            trace.add("user_annotation", "nccl:recv 0<-1", begin, 10)
            trace.collective("SendRecv", begin + 20, 4000 - length, launch=begin + 5)
            compute(trace, begin + 4020 - length, begin + 4020)
            trace.add("user_annotation", "nccl:recv 0<-1", begin + 11, 10)
            trace.collective("SendRecv", begin + 4020, 5900 - length, launch=begin + 15)
            compute(trace, begin + 9920 - length, begin + 9920)

        traces.append(make_trace(step, rank=rank))
    return traces


def test_pipeline_bubbles(tmp_path: Path) -> None:
    finding = diagnose(tmp_path, *pipeline([3000, 3000])).findings[0]
    assert (finding.cause, finding.variant, finding.axis) == ("bubble", "fill and drain", "pipeline")
    finding = diagnose(tmp_path, *pipeline([1500, 3000, 1500])).findings[0]
    assert (finding.cause, finding.variant, finding.rank) == ("bubble", "imbalance", 1)


def test_uneven_experts(tmp_path: Path) -> None:
    traces = []
    for rank, elements in enumerate([10_000, 10_000, 40_000]):

        def step(trace: TraceBuilder, begin: float, elements: int = elements) -> None:
            compute(trace, begin, begin + 4000)
            args = {"Collective name": "all_to_allv", "In msg nelems": elements, "dtype": "BFloat16"}
            late = 2000 if elements > 10_000 else 0
            trace.kernel("expert_gemm", begin + 4000, 500 + late, launch=begin + 5)
            start = begin + 4500 + late
            trace.collective("SendRecv", start, begin + 7000 - start, launch=begin + 10, **args)
            compute(trace, begin + 7000, begin + 10_000)

        traces.append(make_trace(step, rank=rank))
    diagnosis = diagnose(tmp_path, *traces)
    assert first(diagnosis) == ("experts", "uneven tokens")
    assert diagnosis.findings[0].rank == 2
    assert "straggler" not in {finding.cause for finding in diagnosis.findings}


def test_traces_without_a_device(tmp_path: Path) -> None:
    """Two ranks on Gloo, of which the second computes longer before the all-reduce."""
    traces = []
    for rank, late in enumerate([0.0, 3000.0]):

        def step(trace: TraceBuilder, begin: float, late: float = late) -> None:
            trace.add("cpu_op", "aten::mm", begin, 5000 + late)
            trace.add("cpu_op", "c10d::allreduce_", begin + 5000 + late, 20)
            trace.add(
                "user_annotation", "gloo:all_reduce", begin + 5000 + late, 4900 - late, 2, **{"Input Dims": [[1000]]}
            )

        traces.append(make_trace(step, rank=rank, device=False))
    diagnosis = diagnose(tmp_path, *traces)
    assert first(diagnosis) == ("straggler", "steady")
    assert diagnosis.findings[0].rank == 1
    assert [rank.device for rank in diagnosis.ranks] == ["host", "host"]


def test_traces_without_ranks_are_numbered(tmp_path: Path) -> None:
    traces = [make_trace(COMMUNICATION["one bucket"]) for _ in range(3)]
    for trace in traces:
        trace.header.pop("distributedInfo")
    assert [rank.rank for rank in diagnose(tmp_path, *traces).ranks] == [0, 1, 2]


def test_the_number_of_steps_and_collectives_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.insight.diagnose.trace.collective_calls.MAX_CALLS", 50)
    monkeypatch.setattr("meshwright.insight.diagnose.trace.rank_summary.MAX_STEPS", 3)
    diagnosis = diagnose(tmp_path, make_trace(COMMUNICATION["not bucketed"]))
    assert list(diagnosis.ranks[0].steps) == [0, 1, 2]
    assert diagnosis.ranks[0].breakdown.communication > 0


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both of rank 0; expected one trace per rank, of the same steps"):
        diagnose(tmp_path, *(make_trace(COMMUNICATION["one bucket"]) for _ in range(2)))


def test_the_result_is_json(tmp_path: Path) -> None:
    result = diagnose(tmp_path, make_trace(COMMUNICATION["one bucket"])).to_json()
    assert json.loads(json.dumps(result))["findings"][0]["cause"] == "communication"
    assert set(result["ranks"][0]["steps"]) == {"0", "1", "2", "3", "4"}
    assert Finding(**{**result["findings"][0], "evidence": (), "change": None})
