"""Writes the folder of a run that never ran: records of any number of steps and ranks, a slow rank, and attempts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

START = 1_790_000_000.0


def write_run(
    root: Path,
    *,
    steps: int = 120,
    ranks: int = 4,
    slow_rank: int | None = 2,
    failed_at: int | None = 70,
    resumed_at: int = 60,
    spike: int | None = None,
    lr: float = 3e-4,
    complete: bool = True,
) -> Path:
    """Writes a finished run: the first attempt fails at `failed_at`, and the second resumes at `resumed_at`."""
    for folder in ("events", "attempts/0001", "checkpoints"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "run.toml").write_text(
        f"steps = {steps}\nseed = 1\n[optimizer]\nlr = {lr}\n[layout]\nreplicate = {ranks}\n"
    )
    (root / "identity.json").write_text("{}")
    spans = [(1, 0, steps)] if failed_at is None else [(1, 0, failed_at), (2, resumed_at, steps)]
    files = [(root / "events" / f"rank-{rank:05d}.jsonl").open("w") for rank in range(ranks)]
    supervisor: list[dict[str, Any]] = []
    now = START
    for attempt, first, last in spans:
        (root / f"attempts/{attempt:04d}").mkdir(exist_ok=True)
        supervisor.append(event("attempt_start", attempt, -1, now, restart=attempt - 1))
        now += 4.0
        for rank, file in enumerate(files):
            write(
                file,
                event(
                    "start", attempt, rank, now, steps=steps, ranks=ranks, layout=f"replicate {ranks}", unit="tokens"
                ),
            )
            (root / f"attempts/{attempt:04d}/rank-{rank:05d}.log").write_text(f"rank {rank} prints\n")
        if first:
            write(files[0], event("restored", attempt, 0, now, step=first, checkpoint="step", seconds=0.2, changes=[]))
        for step in range(first, last):
            now = write_step(files, attempt, step, now, slow_rank, spike)
            if step == first + 1:
                write_counters(files, attempt, step, now)
            if (step + 1) % 20 == 0:
                write_checkpoint(root, files[0], attempt, step + 1, now)
        now += 0.5
        if slow_rank is not None:
            message = f"rank {slow_rank} is slow: 1.8 times the median of the others, most of it in forward"
            supervisor.append(
                event(
                    "straggler",
                    attempt,
                    slow_rank,
                    now,
                    step=last - 2,
                    phase="forward",
                    factor=1.8,
                    seconds=0.05,
                    message=message,
                )
            )
        failed = attempt < len(spans)
        if failed:
            incident = {
                "attempt": attempt,
                "outcome": "failed",
                "rank": 1,
                "step": last,
                "phase": "backward",
                "exit_code": 8,
                "error_type": "RankLost",
                "message": "rank 1 was ended by SIGKILL",
                "log_tail": ["last words"],
                "stack": "",
                "ranks": [],
                "samples": [1, 2],
                "checkpoint_step": resumed_at,
                "verdict": "infrastructure",
                "recommendation": "the job restarts from the newest checkpoint",
            }
            (root / f"attempts/{attempt:04d}/incident.json").write_text(json.dumps(incident))
        elif complete:
            write(
                files[0],
                event("end", attempt, 0, now, steps=steps, loss=2.0, skipped=0, stopped="", parameters_digest="00"),
            )
        supervisor.append(event("attempt_end", attempt, -1, now + 0.5, restart=attempt - 1))
        now += 1.5
    for file in files:
        file.close()
    (root / "events/supervisor.jsonl").write_text("".join(json.dumps(record) + "\n" for record in supervisor))
    return root


def event(kind: str, attempt: int, rank: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "rank": rank, "time": round(time, 6), **fields}


def write(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, separators=(",", ":")) + "\n")


def write_step(files: list[Any], attempt: int, step: int, now: float, slow: int | None, spike: int | None) -> float:
    """Writes one step of every rank and returns when it ended."""
    local = [0.06 + 0.004 * math.sin(step / 9 + rank) + (0.05 if rank == slow else 0.0) for rank in range(len(files))]
    seconds = max(local) + 0.01
    loss = 2.0 + 8.0 * math.exp(-step / 40) + 0.05 * math.sin(step) + (6.0 if step == spike else 0.0)
    for rank, file in enumerate(files):
        wait = seconds - local[rank]
        forward, backward = 0.3 * local[rank], 0.55 * local[rank]
        phases = {
            "fetch": 0.05 * local[rank],
            "copy": 0.01 * local[rank],
            "forward": forward,
            "backward": backward + 0.4 * wait,
            "sync": 0.6 * wait,
            "update": 0.09 * local[rank],
        }
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": 1.0 + 3.0 * math.exp(-step / 30),
            "lr": 1e-4,
            "tokens": 4096,
            "samples": 32,
            "begin": round(now, 6),
            "phases": {k: round(v, 7) for k, v in phases.items()},
            "waits": {"backward": round(0.4 * wait, 7)},
            "seconds": round(seconds, 7),
            "communication": {"exposed_seconds": round(wait, 7), "exposed_source": "host waits"},
            "memory": 400 << 20,
            "skipped": False,
            "counted": False,
        }
        write(file, event("step", attempt, rank, now + seconds, **record))
    return now + seconds + 0.002


def write_counters(files: list[Any], attempt: int, step: int, now: float) -> None:
    classes = {
        "parameter": 120 << 20,
        "gradient": 60 << 20,
        "optimizer": 120 << 20,
        "activation": 80 << 20,
        "temporary": 9 << 20,
    }
    for rank, file in enumerate(files):
        at_peak = classes | {"activation": (80 + 5 * rank) << 20}
        memory = {"peak": at_peak, "at_peak": at_peak, "peak_total": sum(at_peak.values()), "after": at_peak}
        write(file, event("counters", attempt, rank, now, step=step, communication=[], memory=memory))


def write_checkpoint(root: Path, file: Any, attempt: int, step: int, now: float) -> None:
    folder = root / "checkpoints" / f"step-{step:08d}.a{attempt:04d}"
    folder.mkdir(exist_ok=True)
    if step % 60 == 0:
        (folder / "manifest.json").write_text("{}")
    write(
        file,
        event(
            "checkpoint",
            attempt,
            0,
            now,
            step=step,
            folder=f"checkpoints/{folder.name}",
            bytes=300 << 20,
            stall_seconds=0.03,
            seconds=0.4,
            skipped=0,
            deleted=[],
        ),
    )
