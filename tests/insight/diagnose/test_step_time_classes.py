"""Every cause of slow steps is found in the records that show it, and not in those that nearly do."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run.diagnose import diagnose_run, order_findings
from meshwright.insight.diagnose.run.step_time import (
    checkpoint_stall,
    communication,
    data_wait,
    device_use,
    expert_loads,
    memory_thrash,
    profiled_steps,
    stragglers,
)

MIB = 1 << 20


def test_undisturbed_run_is_healthy(run):
    findings = diagnose_run(run().history())
    assert [finding.cause for finding in findings] == ["healthy"]
    assert findings[0].confidence == "high"
    assert findings[0].check.startswith("meshwright report /")


def test_run_with_few_steps_is_not_judged(run):
    (finding,) = diagnose_run(run(steps=4).history())
    assert (finding.cause, finding.variant, finding.confidence) == ("not judged", "too few steps", "low")


def test_periodic_stall_of_the_loader_is_data_bound(run):
    job = run(steps=50)
    job.phases = lambda _rank, step: {"fetch": 0.4} if step % 6 == 0 else {}
    assert not list(stragglers.find(job.history()))
    (finding,) = data_wait.find(job.history())
    assert (finding.variant, finding.phase) == ("periodic", "fetch")


@pytest.mark.parametrize("seed", range(5))
def test_one_slow_sample_in_37_on_four_ranks_is_data_bound(run, seed):
    """No rank stalls often, and in no step do all of them."""
    order = np.random.default_rng(seed).permutation(8 * 60)
    job = run("--batch.global=8", ranks=4, steps=60)
    slow = {(step, rank): any(order[8 * step + 2 * rank :][:2] % 37 == 0) for step in range(60) for rank in range(4)}
    stalled = [step for step in range(2, 60) if any(slow[step, rank] for rank in range(4))]
    stall = lambda step: 0.2 * (step in stalled)  # noqa: E731
    job.phases = lambda rank, step: {"fetch": 0.201} if slow[step, rank] else {"sync": 0.002 + stall(step)}
    first = diagnose_run(job.history())[0]
    assert (first.cause, first.variant, first.phase) == ("data", "random stalls", "fetch")
    assert f"in {len(stalled)} of 58 steps" in first.sentence
    assert first.share == pytest.approx(0.2 * len(stalled) / (0.1 * 58 + 0.2 * len(stalled)))
    assert first.change.predicted_seconds == pytest.approx(0.1)
    assert first.change.settings == ("data.workers = 2",)


def test_slow_samples_at_a_period_of_every_rank_are_no_stragglers(run):
    job = run("--batch.global=4", ranks=4, steps=200)
    job.phases = lambda rank, step: {"fetch": 0.5} if step % 36 == 9 * rank else {}
    assert [finding.cause for finding in diagnose_run(job.history())] == ["data"]


def test_stalls_in_every_phase_are_a_busy_machine_and_not_data(run):
    random = np.random.default_rng(0)
    stalls = {(rank, step): phase for rank in range(4) for step, phase in enumerate(random.integers(0, 12, 200))}
    names = {0: "fetch", 1: "forward", 2: "backward"}
    job = run("--batch.global=8", ranks=4, steps=200)
    job.phases = lambda rank, step: {names[stalls[rank, step]]: 0.2} if stalls[rank, step] in names else {}
    assert not list(data_wait.find(job.history()))


def test_slow_loader_of_all_ranks_is_data_bound(run):
    job = run()
    job.phases = lambda _rank, _step: {"fetch": 0.05}
    (finding,) = data_wait.find(job.history())
    assert (finding.variant, finding.phase, finding.change.settings) == ("loader", "fetch", ("data.workers = 2",))
    assert not list(stragglers.find(job.history()))


def test_slow_loader_with_workers_gets_more_of_them(run):
    job = run("--data.workers=2", "--data.worker_kind=process")
    job.phases = lambda _rank, _step: {"fetch": 0.05}
    (finding,) = data_wait.find(job.history())
    assert finding.change.settings == ("data.workers = 4", "data.prefetch = 8")


def test_slow_loader_of_one_rank_is_a_straggler(run):
    job = run()
    job.phases = lambda rank, _step: {"fetch": 0.05} if rank else {"sync": 0.05}
    assert not list(data_wait.find(job.history()))
    (finding,) = stragglers.find(job.history())
    assert (finding.rank, finding.phase) == (1, "fetch")


def ddp(job, buckets, megabytes, sync):
    job.communication = {"buckets": buckets, "message_bytes": megabytes * MIB}
    job.phases = lambda _rank, _step: {"sync": sync}
    return list(communication.find(job.history()))


def test_small_buckets(run):
    (finding,) = ddp(run("--ddp.bucket_cap_mb=0.01"), 200, 4, 0.05)
    assert (finding.variant, finding.axis, finding.change.settings) == (
        "small buckets",
        "replicate",
        ("ddp.bucket_cap_mb = 1.0",),
    )


def test_one_bucket_starts_late(run):
    (finding,) = ddp(run("--ddp.bucket_cap_mb=1000"), 1, 64, 0.05)
    assert (finding.variant, finding.change.settings) == ("late start", ("ddp.bucket_cap_mb = 8.0",))


@pytest.mark.parametrize(
    ("settings", "buckets", "megabytes", "sync"),
    [
        ((), 1, 4, 0.02),  # a small model has one bucket, and splitting it does not help
        ((), 4, 80, 0.02),  # buckets overlap, and the rest is exposed
        (("--ddp.bucket_cap_mb=1000",), 1, 64, 0.002),  # late, and fast enough
    ],
)
def test_buckets_that_cost_little_are_not_reported(run, settings, buckets, megabytes, sync):
    assert not ddp(run(*settings), buckets, megabytes, sync)


def test_waits_for_a_straggler_are_not_communication(run):
    job = run("--ddp.bucket_cap_mb=1000")
    job.communication = {"buckets": 1, "message_bytes": 64 * MIB}
    job.phases = lambda rank, _step: {"forward": 0.1} if rank else {"sync": 0.072}
    assert not list(communication.find(job.history()))


def test_slow_link_between_hosts(run):
    job = run()
    job.start["hosts"] = ["a", "b"]
    (finding,) = ddp(job, 1, 8, 0.5)
    assert (finding.variant, finding.axis) == ("slow link", "replicate")
    assert "from a to b" in finding.sentence


def test_low_bandwidth_within_a_host_is_no_slow_link(run):
    (finding,) = ddp(run(), 1, 8, 0.5)
    assert finding.variant == "late start"


def test_link_is_compared_with_the_prediction_where_there_is_one(run):
    job = run()
    job.start["hosts"] = ["a", "b"]
    job.write_plan(communication=[{"axis": "replicate", "seconds": 0.4}])
    assert [finding.variant for finding in ddp(job, 1, 8, 0.5)] == ["late start"]


def test_synchronous_collectives_of_fsdp_do_not_overlap(run):
    job = run("--layout.shard=parameters")
    job.waits = lambda _rank, _step: {"forward": 0.01, "backward": 0.03}
    job.other_events = [counters("shard", "all_gather", 40 * MIB)]
    (finding,) = communication.find(job.history())
    assert (finding.variant, finding.axis, finding.change.settings) == (
        "no overlap",
        "shard",
        ('layout.shard = "none"',),
    )


def test_tensor_parallelism_across_hosts_is_wrongly_placed(run):
    job = run("--layout.replicate=2", "--layout.tensor=2", ranks=4)
    job.start["hosts"] = ["a", "b", "a", "b"]
    job.waits = lambda _rank, _step: {"forward": 0.02, "backward": 0.03}
    job.other_events = [counters("tensor", "all_gather", 40 * MIB)]
    (finding,) = communication.find(job.history())
    assert (finding.variant, finding.axis, finding.change.settings) == ("wrong placement", "tensor", ())
    assert "host by host" in finding.change.action


@pytest.mark.parametrize(
    ("hosts", "variant", "expected"),
    [
        ("aaabbb", "wrong placement", ("layout.tensor = 3", "layout.replicate = 2")),
        ("aabbcc", "wrong placement", ("layout.tensor = 2", "layout.replicate = 3")),
        ("aaaaaa", "volume", ("layout.tensor = 3", "layout.replicate = 2")),
    ],
)
def test_smaller_tensor_degree_keeps_the_number_of_ranks(run, hosts, variant, expected):
    sizes = ("--model.width=96", "--model.heads=6", "--model.kv_heads=6", "--model.ffn=192", "--model.vocab=258")
    job = run(*sizes, "--data.sequence=96", "--layout.replicate=1", "--layout.tensor=6", ranks=6)
    job.start["hosts"] = list(hosts)
    job.waits = lambda _rank, _step: {"forward": 0.02, "backward": 0.03}
    job.other_events = [counters("tensor", "all_gather", 40 * MIB)]
    (finding,) = communication.find(job.history())
    assert (finding.variant, finding.change.settings) == (variant, expected)


def counters(axis, collective, wire):
    row = {"axis": axis, "collective": collective, "calls": 8, "message_bytes": wire, "wire_bytes": wire, "ranks": 2}
    memory = {"peak": {}, "at_peak": {}, "peak_total": 1, "after": {}}
    return {"kind": "counters", "step": 1, "communication": [row], "memory": memory}


def experts(run, loads, *settings):
    job = run("--model.experts=4", *settings)
    job.other_events = [{"kind": "experts", "step": 20, "loads": loads, "dropped": [0] * len(loads)}]
    return list(expert_loads.find(job.history()))


def test_collapsed_routing_is_found_and_precedes_slow_steps(run):
    (finding,) = experts(run, [[25, 25, 25, 25], [0, 50, 50, 0]])
    assert (finding.variant, finding.step) == ("collapsed routing", 20)
    assert "expert 1 of block 1" in finding.sentence
    slow = Finding("data", "loader", "", 0.9, "high")
    assert order_findings([slow, finding])[0] is finding


def test_skewed_routing_matters_if_ranks_wait_for_it(run):
    assert not experts(run, [[70, 10, 10, 10]])


def test_skewed_routing_under_expert_parallelism(run):
    (finding,) = experts(run, [[70, 10, 10, 10]], "--layout.expert=2")
    assert (finding.variant, finding.axis) == ("skewed routing", "expert")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), ("model.router_bias_rate = 0.01", "model.router_aux_loss = 0.001")),
        (("--model.router_bias_rate=0.05",), ("model.router_bias_rate = 0.1", "model.router_aux_loss = 0.001")),
        (("--model.router_bias_rate=0.2",), ("model.router_aux_loss = 0.001",)),
    ],
)
def test_load_balancing_becomes_stronger_never_weaker(run, settings, expected):
    (finding,) = experts(run, [[0, 50, 50, 0]], *settings)
    assert finding.change.settings == expected


def test_even_routing_has_no_finding(run):
    assert not experts(run, [[30, 20, 28, 22]], "--layout.expert=2")


def saves(run, seconds, stall, *settings):
    job = run("--checkpoint.every=10", *settings)
    job.outside = lambda _rank, step: {"save": stall} if step and step % 10 == 0 else {}
    facts = {"bytes": 10_000_000, "stall_seconds": stall, "seconds": seconds}
    job.other_events = [{"kind": "checkpoint", "step": step, "folder": "x", **facts} for step in (10, 20)]
    return list(checkpoint_stall.find(job.history()))


def test_synchronous_saves_to_a_slow_disk(run):
    (finding,) = saves(run, 2.0, 2.0, "--checkpoint.mode=sync")
    assert (finding.variant, finding.change.settings) == ("slow disk", ('checkpoint.mode = "async"',))
    assert finding.share == pytest.approx(4 / 7, rel=0.01)


def test_synchronous_saves_to_a_fast_disk(run):
    (finding,) = saves(run, 0.5, 0.5, "--checkpoint.mode=sync")
    assert finding.variant == "synchronous saves"


@pytest.mark.parametrize(("seconds", "expected"), [(0, ()), (2, ("300.0",)), (600, ("2400.0",))])
def test_frequent_saves_become_rarer_by_every_trigger(run, seconds, expected):
    (finding,) = saves(run, 0.5, 0.5, f"--checkpoint.seconds={seconds}")
    by_time = tuple(f"checkpoint.seconds = {value}" for value in expected)
    assert finding.change.settings == ("checkpoint.every = 40", *by_time)


def test_slow_disk_that_nobody_waits_for_is_not_reported(run):
    assert not saves(run, 2.0, 0.01)


@pytest.mark.parametrize(("faults", "found"), [(200, True), (3, False)])
def test_swapping_is_found_by_major_page_faults(run, faults, found):
    job = run()
    job.fields = lambda rank, _step: {"major_faults": faults} if rank == 1 else {}
    findings = list(memory_thrash.find(job.history()))
    assert [(finding.variant, finding.rank) for finding in findings] == ([("swapping", 1)] if found else [])


def test_swapping_of_several_ranks_is_one_finding_of_the_worst(run):
    job = run(ranks=4)
    job.fields = lambda rank, _step: {"major_faults": 100 * (1 + rank % 3)}
    assert [(finding.variant, finding.rank) for finding in memory_thrash.find(job.history())] == [("swapping", 2)]


@pytest.mark.parametrize(("predicted", "variants"), [(0.02, ["small kernels"]), (0.07, []), (None, [])])
def test_passes_that_take_longer_than_predicted_under_use_the_device(run, predicted, variants):
    job = run("--batch.micro=1")
    if predicted is not None:
        job.write_plan(seconds=0.1, phases={"forward": predicted / 3, "backward": predicted * 2 / 3})
    findings = list(device_use.find(job.history()))
    assert [finding.variant for finding in findings] == variants
    assert all(finding.change.settings == ("batch.micro = 2",) for finding in findings)


def test_broken_precedes_slow_and_share_orders_the_rest():
    findings = [
        Finding("data", "", "", 0.5, "low"),
        Finding("straggler", "", "", 0.3, "high"),
        Finding("replay", "", "", 0.1, "high"),
        Finding("hang", "", "", 0.0, "low"),
    ]
    assert [one.cause for one in order_findings(findings)] == ["hang", "replay", "straggler", "data"]


def test_change_has_a_predicted_step_time(run):
    job = run()
    job.phases = lambda _rank, _step: {"fetch": 0.05}
    change = diagnose_run(job.history())[0].change
    assert change.predicted_by == "measured share"
    assert change.predicted_seconds == pytest.approx(0.149 - 0.05, rel=0.02)


def test_newest_profile_of_a_run_shows_its_kernels(run):
    job = run()
    job.start["device"] = "NVIDIA H100"
    (job.folder / "trace").mkdir()
    write_profile(job.folder / "trace" / "rank-00000.steps-2-4.a0001.json.gz", kernels=1)
    write_profile(job.folder / "trace" / "rank-00000.steps-12-14.a0001.json.gz", kernels=300)
    findings = list(profiled_steps.find(job.history()))
    assert [finding.cause for finding in findings] == ["device"]
    assert findings[0].sentence.startswith("In the profiled steps: ")


def test_profile_that_is_cut_off_is_left_out(run):
    job = run()
    (job.folder / "trace").mkdir()
    (job.folder / "trace" / "rank-00000.steps-2-4.a0001.json.gz").write_bytes(b"\x1f\x8b\x08")
    assert not list(profiled_steps.find(job.history()))


def write_profile(path, kernels):
    """A trace of three steps of 3 ms, in which short kernels are launched one by one."""
    events = []
    for step in range(3):
        start = 3000.0 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", start, 3000.0, tid=1))
        for index in range(kernels):
            at, link = start + index * 3000.0 / kernels, {"correlation": 1 + step * kernels + index}
            events.append(event("cpu_op", "aten::add", at, 3000.0 / kernels * 0.9, tid=1))
            events.append(event("cuda_runtime", "cudaLaunchKernel", at, 2.0, tid=1, args=link))
            length = 1.0 if kernels > 1 else 2990.0
            events.append(event("kernel", "add", at + 2.5, length, tid=7, pid=0, args=link | {"stream": 7}))
    with gzip.open(path, "wt") as file:
        json.dump({"deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": events}, file)


def event(category, name, start, length, tid, pid=99, args=None):
    times = {"ts": start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args or {}}
