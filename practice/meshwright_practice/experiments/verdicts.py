"""Diagnosis: what `diagnose` names in records of slow runs, in runs that break, and in a profiler trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.config import config_to_toml, load_config
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.diagnose.finding import Finding
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.diagnose.trace.diagnose import TraceDiagnosis, diagnose_traces
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.small_runs import SmallRun, scratch_folder, train_small
from meshwright_practice.pictures import Bars, GanttChart, Span

TYPICAL = {"fetch": 0.001, "copy": 0.0, "forward": 0.03, "backward": 0.06, "sync": 0.002, "update": 0.007}
"""Seconds of the phases of a step of 0.1 s that nothing limits."""
STEPS = 30
MIB = 1 << 20
TRACED_STEPS, NCCL_STREAM = 4, 20


@dataclass(frozen=True)
class SlowRun:
    """The records of a run that one thing makes slow."""

    settings: tuple[str, ...] = ()
    phases: Callable[[int, int], Mapping[str, float]] = lambda _rank, _step: {}
    """seconds of a rank and step that differ from TYPICAL"""
    outside: Callable[[int], Mapping[str, float]] = lambda _step: {}
    """seconds before a step"""
    communication: Mapping[str, Any] = field(default_factory=dict)
    fields: Callable[[int], Mapping[str, Any]] = lambda _rank: {}
    """further fields of the step records of a rank"""
    events: tuple[Mapping[str, Any], ...] = ()
    plan: Mapping[str, Any] | None = None


def save_event(step: int) -> Mapping[str, Any]:
    facts = {"bytes": 10_000_000, "stall_seconds": 2.0, "seconds": 2.0}
    return {"kind": "checkpoint", "step": step, "folder": "x", **facts}


SLOW_RUNS: dict[str, SlowRun] = {
    "healthy": SlowRun(),
    "communication": SlowRun(
        ("ddp.bucket_cap_mb=1000",),
        phases=lambda _rank, _step: {"sync": 0.05},
        communication={"buckets": 1, "message_bytes": 64 * MIB},
    ),
    "bubble": SlowRun(
        ("layout.replicate=1", "layout.pipeline=2", "model.layers=4", "batch.global=8", "batch.micro=4"),
        phases=lambda _rank, _step: {"sync": 0.04},
    ),
    "data": SlowRun(phases=lambda _rank, _step: {"fetch": 0.05}),
    "device": SlowRun(("batch.micro=1",), plan={"seconds": 0.1, "phases": {"forward": 0.007, "backward": 0.013}}),
    "straggler": SlowRun(phases=lambda rank, _step: {"forward": 0.08} if rank == 1 else {"sync": 0.052}),
    "memory": SlowRun(fields=lambda rank: {"major_faults": 200} if rank == 1 else {}),
    "checkpoint": SlowRun(
        ("checkpoint.every=10", "checkpoint.mode=sync"),
        outside=lambda step: {"save": 2.0} if step and step % 10 == 0 else {},
        events=(save_event(10), save_event(20)),
    ),
}
"""Cause that `diagnose` must name first -> the records that show it."""
FOUR = ("communication", "bubble", "data", "device")
"""The four categories that are usually listed."""


def write_records(root: Path, run: SlowRun) -> RunHistory:
    """Writes the records of two ranks as the trainer writes them."""
    config = load_config(overrides=[*run.settings, "launch.device=cpu"], steps=STEPS)
    (root / "events").mkdir(parents=True)
    (root / "run.toml").write_text(config_to_toml(config))
    if run.plan is not None:
        (root / "plan.json").write_text(json.dumps(run.plan))
    for rank in range(2):
        now = 1001.0
        start = {"ranks": 2, "steps": STEPS, "device": "cpu", "hosts": ["one", "one"]}
        events: list[Mapping[str, Any]] = [record("start", rank, 1000.0) | start]
        for step in range(STEPS):
            outside = run.outside(step)
            phases = dict.fromkeys(STEP_PHASES, 0.0) | TYPICAL | dict(run.phases(rank, step))
            now += sum(outside.values())
            seconds = sum(phases.values())
            communication = {"exposed_seconds": phases["sync"], "exposed_source": "host waits", **run.communication}
            values: dict[str, Any] = {
                "step": step,
                "begin": now,
                "seconds": seconds,
                "loss": 2.0,
                "phases": phases,
                "waits": {},
            }
            values |= {"outside": dict(outside), "communication": communication, **run.fields(rank)}
            now += seconds
            events.append(record("step", rank, now) | values)
        if rank == 0:
            events += [record(str(event["kind"]), 0, now) | dict(event) for event in run.events]
            events.append(record("end", 0, now) | {"steps": STEPS, "loss": 2.0, "stopped": ""})
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (root / "events" / f"rank-{rank:05d}.jsonl").write_text(lines)
    return RunHistory(RunFolder(root))


def record(kind: str, rank: int, time: float) -> dict[str, Any]:
    return {"kind": kind, "attempt": 1, "rank": rank, "time": time}


def slow_runs(_knobs: Knobs) -> Observation:
    """Diagnoses the records of eight runs, each with steps of known times."""
    first: dict[str, Finding] = {}
    with scratch_folder() as folder:
        for cause, run in SLOW_RUNS.items():
            first[cause] = diagnose_run(write_records(folder / cause, run))[0]
    named = {cause: float(finding.cause == cause) for cause, finding in first.items()}
    values = {f"named_{cause}": value for cause, value in named.items()}
    causes = {finding.cause for finding in first.values()} - {"healthy"}
    values |= {
        "causes_named": float(len(causes)),
        "causes_of_the_four": float(len(FOUR)),
        "named_outside_the_four": float(len(causes - set(FOUR))),
        "straggler_rank": float(-1 if first["straggler"].rank is None else first["straggler"].rank),
        "communication_has_a_setting": float(bool(first["communication"].change.settings)),
        "share_communication": first["communication"].share,
        "share_data": first["data"].share,
    }
    labels = tuple(cause for cause in first if cause != "healthy")
    shares = tuple(first[cause].share for cause in labels)
    notes = ("The records are synthetic: their steps have known times.", *(found.sentence for found in first.values()))
    return Observation(
        values, Bars("share of the step that the change wins back", "", labels, {"share": shares}), notes
    )


def busy_device(knobs: Knobs) -> Observation:
    """Diagnoses two synthetic profiler traces: one in which the all-reduce waits on the device while nothing is
    computed, and one in which a part of it runs beside matrix products.
    """
    compute, all_reduce = int(knobs["compute_us"]), int(knobs["all_reduce_us"])
    exposed = step_trace(compute, all_reduce, 0)
    overlapped = step_trace(compute, all_reduce, int(knobs["overlapped_us"]))
    with scratch_folder() as folder:
        diagnosis = diagnose_kernels(folder / "exposed.json", exposed)
        other = diagnose_kernels(folder / "overlapped.json", overlapped)
    parts, first = diagnosis.ranks[0].breakdown, diagnosis.findings[0]
    step, step_overlapped = (found.ranks[0].steps[1] for found in (diagnosis, other))
    values = {
        "utilization": 1 - parts.share(parts.idle),
        "compute_share": parts.share(parts.compute),
        "exposed_share": parts.share(parts.exposed),
        "named_communication": float(first.cause == "communication"),
        "overlap": parts.overlap,
        "all_reduce_us": step.communication * 1e6,
        "all_reduce_us_overlapped": step_overlapped.communication * 1e6,
        "exposed_us_overlapped": step_overlapped.exposed * 1e6,
    }
    spans = tuple(
        Span(
            f"{'NCCL' if event['tid'] == NCCL_STREAM else 'compute'} stream, {name}",
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        for name, events in (("exposed", exposed), ("overlapped", overlapped))
        for event in events
        if event["cat"] == "kernel"
    )
    notes = (
        "A utilization counter reports the share of time in which any kernel runs.",
        "The traces are synthetic: kernels have the times of the knobs, and diagnose measures what is exposed.",
        first.sentence,
    )
    return Observation(values, GanttChart("kernels on the device", "us", spans), notes)


def step_trace(compute: int, all_reduce: int, overlapped: int) -> list[dict[str, Any]]:
    """The events of steps in which the all-reduce starts `overlapped` microseconds before the end of compute."""
    length = compute + all_reduce - overlapped
    events: list[dict[str, Any]] = []
    for step in range(TRACED_STEPS):
        begin = length * step
        events.append(trace_event("user_annotation", f"ProfilerStep#{step}", begin, length, 1))
        reduction = ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin + compute - overlapped, all_reduce, NCCL_STREAM)
        for index, (name, start, duration, stream) in enumerate((("gemm", begin, compute, 7), reduction)):
            link = {"correlation": 10 * step + index + 1}
            events.append(trace_event("cuda_runtime", "cudaLaunchKernel", begin + index, 1, 1, **link))
            events.append(trace_event("kernel", name, start, duration, stream, stream=stream, **link))
    return events


def diagnose_kernels(path: Path, events: list[dict[str, Any]]) -> TraceDiagnosis:
    header = {"deviceProperties": [{"id": 0, "name": "GPU"}], "distributedInfo": {"rank": 0, "world_size": 8}}
    path.write_text(json.dumps(header | {"traceEvents": events}))
    return diagnose_traces([path])


def trace_event(category: str, name: str, start: float, duration: float, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


def failures(_knobs: Knobs) -> Observation:
    """Breaks runs on two ranks in four ways, and diagnoses each."""
    settings = ("layout.replicate=2", "batch.global=4", "model.layers=1")
    saves = ("checkpoint.mode=sync", "checkpoint.every=2", "checkpoint.seconds=0")
    with scratch_folder() as folder:
        memory = train_small(
            folder / "memory", *settings, steps=6, faults="step.forward:rank1:oom@step3", may_fail=True
        )
        killed = train_small(
            folder / "killed", *settings, steps=6, faults="step.update:rank1:kill@step2", may_fail=True
        )
        repeated = train_small(
            folder / "repeated", *settings, "launch.restarts=3", steps=6, faults="step.forward:rank1:raise@step3x9",
            may_fail=True,
        )  # fmt: skip
        train_small(folder / "corrupt", *settings, *saves, steps=4)
        damage(max((folder / "corrupt" / "checkpoints").iterdir()))
        resumed = train_small(folder / "corrupt", *settings, *saves, steps=6)
        found = {name: diagnose_run(run.history)[0] for name, run in (("memory", memory), ("killed", killed))}
        found["repeated"] = diagnose_run(repeated.history)[0]
        logs = [memory.folder.log(1, rank).read_text(errors="replace") for rank in range(2)]
        values = {
            "memory_rank": float(-1 if found["memory"].rank is None else found["memory"].rank),
            "memory_step": float(-1 if found["memory"].step is None else found["memory"].step),
            "killed_is_infrastructure": float(found["killed"].variant == "infrastructure"),
            "killed_rank": float(-1 if found["killed"].rank is None else found["killed"].rank),
            "repeated_is_infrastructure": float(found["repeated"].variant == "infrastructure"),
            "repeated_attempts": float(len(repeated.incidents())),
            "rank_0_log_names_memory": float("MemoryError" in logs[0]),
            "rank_1_log_names_memory": float("MemoryError" in logs[1]),
            "ranks_that_stop": float(count_stopped(memory)),
            "corrupt_restored_step": float(resumed.events("restored")[-1]["step"]),
            "corrupt_newest_step": 4.0,
            "corrupt_reported": float(len(resumed.events("damaged"))),
        }
    labels = ("memory", "killed", "repeated")
    steps = tuple(float(found[name].step or 0) for name in labels)
    notes = tuple(found[name].sentence for name in labels)
    return Observation(values, Bars("step of the first failure", "step", labels, {"step": steps}), notes)


def damage(checkpoint: Path) -> None:
    """Flips one byte of the first shard."""
    shard = min(checkpoint.glob("*.shard"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def count_stopped(run: SmallRun) -> int:
    """The ranks that completed no step after the failing one."""
    [incident] = run.incidents()
    failed = incident.step or 0
    return sum(max(run.steps(rank), default=-1) < failed for rank in range(2))
