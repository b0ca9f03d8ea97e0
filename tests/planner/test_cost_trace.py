"""One trace per rank: shortened loops and schedules change neither time nor memory nor bytes."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.hardware.links import GroupPlacement
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedule_orders import action_orders
from meshwright.base.topology.schedule_timeline import peak_in_flight_by_stage
from meshwright.planner.calibration.corrections import UNCORRECTED
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.comm_volume import comm_volume, trace_volume
from meshwright.planner.cost.peak_memory import estimate_memory, rank_traces
from meshwright.planner.cost.trace.operations import Allocate, Communicate, Compute, Repeat, Wait, flatten
from meshwright.planner.cost.trace.pass_memory import MemoryWalk, pass_memory
from meshwright.planner.cost.trace.pass_time import pass_time
from meshwright.planner.cost.trace.schedule_passes import ScheduleSize, passes_per_step, schedule_passes, shortened
from meshwright.planner.search.candidate import Candidate, candidate_job, exact_job
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import TRAINERS, trainer_profile
from meshwright.planner.workload.workload_args import build_workload
from tests.kit.hybrid_layouts import MACHINE, balanced_config
from tests.kit.small_run import load_cpu_config

LAYOUTS = (
    "replicate=1 recompute=full layers=5",
    "replicate=2 layers=5",
    "replicate=2 shard=optimizer precision=bf16 layers=5",
    "replicate=2 shard=gradients layers=5",
    "replicate=2 shard=parameters recompute=full layers=6 segment=2",
    "replicate=2 shard=parameters tensor=2 layers=5",
    "replicate=2 shard=parameters expert=2 experts=4 experts_shared=1 layers=5",
    "replicate=2 shard=parameters pipeline=2 layers=8",
    "replicate=2 shard=parameters pipeline=2 schedule=interleaved layers=8",
    "replicate=2 shard=optimizer pipeline=2 schedule=zero-bubble precision=bf16 layers=8",
    "pipeline=2 schedule=zbv layers=8",
    "pipeline=2 schedule=dualpipev layers=8",
    "context=2 pipeline=2 schedule=gpipe layers=8",
)
LINK = GroupPlacement(8, 8)


def job_of(row: str) -> PlannedJob:
    return PlannedJob.from_config(balanced_config(row), MACHINE)


@pytest.mark.parametrize("row", LAYOUTS)
def test_repeated_blocks_have_the_time_and_memory_of_the_written_out_ones(row):
    for trace in rank_traces(job_of(row)):
        for kind, _ in trace.counts:
            operations = trace.operations(kind)
            flat = tuple(flatten(operations))
            shortened_memory, memory = pass_memory(operations), pass_memory(flat)
            assert shortened_memory.peak_total == pytest.approx(memory.peak_total)
            assert shortened_memory.change == pytest.approx(memory.change)
            assert shortened_memory.peak_gradients == pytest.approx(memory.peak_gradients)
            assert shortened_memory.peak_parameters == pytest.approx(memory.peak_parameters)
            times = pass_time(operations, 0.06), pass_time(flat, 0.06)
            assert times[0].phases == pytest.approx(times[1].phases)


@pytest.mark.parametrize("row", LAYOUTS)
def test_peak_memory_is_that_of_a_walk_over_the_whole_step(row):
    """The estimate evaluates few passes; the walk runs all of them, operation by operation."""
    job = job_of(row)
    for rank, (trace, memory) in enumerate(zip(rank_traces(job), estimate_memory(job), strict=True)):
        walk = MemoryWalk()
        walk.run(trace.begin)
        for kind in schedule_passes(trace.schedule, rank, trace.resharding, trace.partly):
            walk.run(flatten(trace.operations(kind)))
        walk.run(trace.end)
        assert memory.tensors == pytest.approx(walk.peak_total)


@pytest.mark.parametrize("row", LAYOUTS)
def test_a_step_leaves_nothing_but_state_and_gradients(row):
    for trace in rank_traces(job_of(row)):
        walk = MemoryWalk()
        walk.run(trace.begin)
        before = tuple(walk.state)
        for kind in trace.passes:
            walk.run(trace.operations(kind))
        parameters, gradients, optimizer, activations, logits, unsharded, communication = walk.state
        assert (parameters, optimizer, communication) == pytest.approx((before[0], before[2], before[6]))
        assert (logits, unsharded) == pytest.approx((0, 0), abs=1e-6)
        assert gradients >= before[1]
        sent = trace.job.batch.accumulation * sum(builder.sent for builder in trace.builders)
        assert activations == pytest.approx(before[3] + sent)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("resharding", ["local", "once", "stays", "reshards"])
def test_counted_passes_are_those_of_the_whole_schedule(kind, resharding):
    schedule = ScheduleSize(kind, 4, 64, 1 if kind == "1f1b" else 2)
    assert shortened(schedule).micro_batches == 12
    for rank in range(4):
        counted = dict(passes_per_step(schedule, rank, resharding))
        assert counted == Counter(schedule_passes(schedule, rank, resharding))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_passes_have_the_micro_batches_in_flight_of_the_schedule(kind):
    stages = 1 if kind in ("gpipe", "1f1b") else 2
    for rank in range(4):
        expected = peak_in_flight_by_stage(action_orders(kind, 4, 12, stages)[rank])
        in_flight, peaks = Counter(), Counter()
        for each in schedule_passes(ScheduleSize(kind, 4, 12, stages), rank, "local"):
            in_flight[each.stage] += (each.op == "F") - (each.op in ("B", "W"))
            peaks[each.stage] = max(peaks[each.stage], in_flight[each.stage])
        assert [peaks[stage] for stage in range(stages)] == [expected[stage] for stage in sorted(expected)]


def collective(seconds: float, queue: str = "", hidden: float = 0.0) -> Communicate:
    return Communicate("shard", "all_gather", 1e6, 1, LINK, seconds, hidden, queue)


def test_a_prefetched_gather_is_exposed_as_far_as_it_outlasts_the_computation():
    operations = (collective(2.0, "gather"), Compute("forward", 1.5), Wait("gather"), Compute("forward", 1.0))
    time = pass_time(operations, contention=0.0)
    assert time.phases == pytest.approx({"forward": 2.5, "shard": 0.5})


def test_collectives_of_one_link_run_one_after_the_other():
    operations = (collective(1.0, "gather"), collective(1.0, "reduce"), Compute("forward", 0.5), Wait("reduce"))
    assert pass_time(operations, contention=0.0).seconds == pytest.approx(2.0)


@pytest.mark.parametrize("rounds", [2, 5, 40])
@pytest.mark.parametrize("reduction", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("gather", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("earlier", [0.0, 9.0])
def test_reductions_that_outlast_the_computation_queue_up_in_repeated_blocks(rounds, reduction, gather, earlier):
    """The backward pass of DDP (no gathers) and of FSDP, after a large reduction of the head."""
    across = GroupPlacement(16, 8)
    gathers = (collective(gather, "gather")._replace(placement=across),) if gather else ()
    block = (Wait("gather"), *gathers, Compute("backward", 1.0), collective(reduction, "reduce"))
    block = tuple(each._replace(placement=across) if isinstance(each, Communicate) else each for each in block)
    head = collective(earlier, "reduce")._replace(placement=across)
    operations = (head, Repeat(rounds, block), Wait("reduce"))
    repeated, flat = pass_time(operations, 0.06), pass_time(tuple(flatten(operations)), 0.06)
    assert repeated.phases == pytest.approx(flat.phases)
    assert repeated.seconds >= earlier + rounds * reduction


def test_sends_between_nodes_delay_the_reductions_that_share_their_adapters():
    across = GroupPlacement(8, 1)
    reduction = collective(2.0, "reduce")._replace(placement=across)
    send = Communicate("pipeline", "send", 1e6, 1, across, 1.0)
    alone = pass_time((reduction, Compute("backward", 3.0), Wait("reduce")), contention=0.0)
    shared = pass_time((reduction, send, Compute("backward", 1.5), Wait("reduce")), contention=0.0)
    assert alone.phases == pytest.approx({"backward": 3.0})
    assert shared.phases == pytest.approx({"pipeline": 1.0, "backward": 1.5, "shard": 0.5})


def test_overlapped_collectives_slow_computation_down():
    operations = (collective(1.0, "gather"), Compute("forward", 3.0), Wait("gather"))
    assert pass_time(operations, contention=0.1).phases["contention"] == pytest.approx(0.1)


def test_memory_of_a_loop_peaks_in_its_first_or_last_round():
    grows = Repeat(10, (Allocate(3, 7), Allocate(3, -2)))
    assert (pass_memory([grows]).peak_total, pass_memory([grows]).change[3]) == (9 * 5 + 7, 50)
    shrinks = Repeat(10, (Allocate(3, 7), Allocate(3, -12)))
    assert (pass_memory([shrinks]).peak_total, pass_memory([shrinks]).change[3]) == (7, -50)


@pytest.mark.parametrize("row", LAYOUTS)
def test_plan_and_proof_read_the_bytes_of_the_same_trace(row):
    job = job_of(row)
    plan = estimate(job, corrections=UNCORRECTED)
    bytes_of_plan: Counter[tuple[str, str]] = Counter()
    for call in plan.calls:
        bytes_of_plan[call.axis, call.collective] += round(call.calls * call.message_bytes)
    stride = job.layout.stride("pipeline")
    exact = [comm_volume(job.run_config, job.layout, job.batch, rank * stride) for rank in range(job.layout.pipeline)]
    assert dict(bytes_of_plan) in [{(row.axis, row.collective): row.message_bytes for row in rows} for rows in exact]


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Layout(replicate=8), 1),
        Candidate(Layout(shard=8), 1, "parameters", "full"),
        Candidate(Layout(shard=4, tensor=2), 1, "optimizer"),
        Candidate(Layout(shard=2, context=2, tensor=2), 1, "parameters"),
        Candidate(Layout(pipeline=2, shard=4), 1, "optimizer", "none", "interleaved", 2),
    ],
    ids=str,
)
def test_a_candidate_communicates_what_its_run_will(candidate):
    """A search estimates units from the architecture; the run has the real parameters, with padding."""
    work, cluster = build_workload("llama-8b", batch=64).on(preset_cluster("h100", 8)), preset_cluster("h100", 8)
    volumes = []
    for job in (candidate_job(work, cluster, candidate), exact_job(work, cluster, candidate)):
        rows = trace_volume(rank_traces(job)[0])
        volumes.append({(row.axis, row.collective): row.message_bytes for row in rows if row.axis != "control"})
    estimated, exact = volumes
    assert estimated.keys() == exact.keys()
    one_block = 0.06 if candidate.layout.pipeline > 1 else 0.0  # the run balances the stages by the cost of the head
    for key, message in exact.items():
        assert estimated[key] == pytest.approx(message, rel=1e-3 + one_block), key


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_every_trainer_has_a_trace(name):
    config = load_cpu_config(None, ("--preset=llama-8b",))
    own = PlannedJob.from_config(config, preset_cluster("h100", 1))
    layout = Layout(pipeline=2, shard=2, tensor=2)
    batch = own.batch.__class__(64, 1, 2, 32)
    job = PlannedJob(
        own.model, preset_cluster("h100", 8), layout, batch, 8192, sharding="optimizer", trainer=trainer_profile(name)
    )
    plan = estimate(job, corrections=UNCORRECTED)
    assert {call.axis for call in plan.calls} >= {"tensor", "pipeline", "shard"}
    assert sum(plan.phases.values()) == pytest.approx(plan.seconds)
    assert plan.peak_memory.tensors > 0
