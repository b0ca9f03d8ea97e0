"""A run folder with a record of everything that metrics are read from, held by this process as if it trained."""

from __future__ import annotations

import json
import time
from pathlib import Path

from meshwright.base.history.rollout_counts import DROP_CAUSES
from meshwright.base.io import write_json
from meshwright.base.records.events import EventLog
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.lease import acquire_lease

STEP_SECONDS = 0.5
PHASES = dict(zip(STEP_PHASES, (0.02, 0.01, 0.12, 0.2, 0.1, 0.05), strict=True))
COUNTED_STEP, SKIPPED_STEP = 1, 7


def record_run(path: Path, ranks: int = 2, steps: int = 12) -> RunFolder:
    """Records an attempt that has completed `steps` of 100 steps, and is alive as long as this process."""
    folder = RunFolder(path)
    attempt = acquire_lease(folder).attempt
    write_json(folder.identity_file, {"run": "0123456789abcdef", "timeline": 1})
    write_json(folder.plan_file, {"flops": 2e12, "peak_flops": 4e13, "attempt": attempt})
    folder.run_file.write_text("steps = 100\n")
    supervisor = EventLog(folder.root / "events" / "supervisor.jsonl", attempt, -1)
    supervisor.write("attempt_start", restart=attempt - 1)
    supervisor.write("straggler", rank=1, step=5, phase="forward", factor=2.0, seconds=1.0, message="rank 1 is slow")
    supervisor.close()
    for rank in range(ranks):
        record_rank(folder, attempt, rank, ranks, steps)
        heartbeat = Heartbeat(folder.heartbeat(attempt, rank))
        for step in range(steps):
            heartbeat.enter("update", step)
            heartbeat.complete_step(PHASES)
    return folder


def record_rank(folder: RunFolder, attempt: int, rank: int, ranks: int, steps: int) -> None:
    log = EventLog(folder.events(rank), attempt, rank)
    log.write(
        "start", steps=100, ranks=ranks, layout=f"replicate {ranks}", device="cpu", precision="fp16", unit="tokens"
    )
    begin = time.time() - steps * STEP_SECONDS
    for step in range(steps):
        if rank == 0:
            log.write("rollouts", **rollouts_record(step))
        log.write("step", begin=begin + step * STEP_SECONDS, **step_record(step, rank))
    rows = [{"axis": "replicate", "collective": "all_reduce", "calls": 1, "message_bytes": 800, "wire_bytes": 400}]
    memory = {"peak": {"parameter": 1000}, "at_peak": {"parameter": 1000, "gradient": 500}, "peak_total": 1500}
    log.write("counters", step=COUNTED_STEP, communication=rows, memory=memory | {"after": {}})
    if rank == 0:
        log.write("rollout_problem", message="a generator has died")
        log.write("experts", step=10, loads=[[30, 10, 10, 10], [15, 15, 15, 15]], dropped=[3, 0])
        log.write("eval", step=10, loss=2.25, tokens=640)
        name = f"step-00000008.a{attempt:04d}"
        log.write("checkpoint", step=8, folder=name, bytes=4096, stall_seconds=0.25, seconds=1.5, skipped=0, deleted=[])
        (folder.root / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        (folder.root / "checkpoints" / name / "manifest.json").write_text(json.dumps({}))
        log.write("save_failed", step=10, message="disk full")
        log.write("bad_sample", step=3, sample=4, source="a", index=4, reason="not JSON")
        log.write("nonfinite", step=SKIPPED_STEP, loss=None, module="blocks.1")
        log.write("callback_failed", step=3, callback="mine", hook="on_step", message="no")
    log.close()


def step_record(step: int, rank: int) -> dict:
    return {
        "step": step,
        "loss": 3.0 - 0.01 * step,
        "grad_norm": 1.5,
        "lr": 0.001,
        "tokens": 64,
        "samples": 4,
        "phases": PHASES,
        "waits": {"forward": 0.04, "backward": 0.06},
        "seconds": STEP_SECONDS,
        "communication": {
            "buckets": 2,
            "message_bytes": 800,
            "wire_bytes": 400,
            "exposed_seconds": 0.2,
            "exposed_source": "host waits",
        },
        "noise_scale": 7.5,
        "memory": 1_000_000 + rank,
        "loss_scale": 1024.0,
        "pipeline": {"live": 3, "live_by_stage": [3], "idle": 0.125},
        "experts": {"imbalance": 2.0, "dropped": 3},
        "metrics": ROLLOUT_METRICS,
        **({"counted": True} if step == COUNTED_STEP else {}),
        **({"skipped": True} if step == SKIPPED_STEP else {}),
    }


ROLLOUT_METRICS = {
    "reward": 0.5,
    "reward_std": 0.25,
    "kl": 0.02,
    "entropy": 1.75,
    "clip_share": 0.125,
    "staleness": 1.0,
    "mismatch": 1e-6,
    "queue_depth": 8.0,
}


def rollouts_record(step: int) -> dict:
    """What a step of reinforcement learning records of its rollouts: eight trained ones, and eight left out."""
    trained, dropped = 8 * (step + 1), 8 * (step + 1)
    causes = {cause: [0, 0] for cause in DROP_CAUSES} | {"no_signal": [dropped, 2 * dropped]}
    generated = [trained + dropped + 8, 4 * trained + 2 * dropped + 32]
    counts = {"generated": generated, "trained": [trained, 4 * trained], "in_flight": [8, 32], "dropped": causes}
    return {
        "step": step,
        "groups": [[2 * step, [1, step], 7]],
        "positions": [[1, 64 + 100 * step]],
        "rewards": [0.5],
        "dropped": [[2 * step + 1, [1, step], "no_signal"]],
        "staleness": 1,
        "counts": counts,
        "log": [1, 264 + 100 * step],
        "lineage": {"ended": [], "timeline": 1},
        "mismatch": {"mean_difference": 1e-6},
        "wait_seconds": 0.25,
        "generators": 2,
        "generator_idle_seconds": 0.1 * step,
        "generator_seconds": 1.0 * step,
    }
