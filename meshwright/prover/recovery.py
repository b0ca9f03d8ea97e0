"""Checks recovery: kills a small run of the config at every fail point, and compares it with an undisturbed run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.listing import CheckpointEntry, list_published, open_run_store
from meshwright.checkpoint.unsharded import compare_checkpoints, state_digest
from meshwright.config import CheckpointConfig, LayoutConfig, RunConfig
from meshwright.launch.job import make_job, start_ranks
from meshwright.prover.layouts import accumulation_steps, describe_settings, fit_reshard_degree, limit_stages
from meshwright.prover.scale_down import scale_layout, scale_model, scale_sequence
from meshwright.recover.incidents import Incident, read_incidents
from meshwright.recover.supervisor import RunningRanks, supervise
from meshwright.telemetry.events import completed_steps
from meshwright.telemetry.phases import STEP_PHASES
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import min_shard_group_size, validate

STEP_POINTS = (*STEP_PHASES, "updated")
SAVE_POINTS = ("stage", "begin", "write", "after_shard", "before_manifest", "before_publish", "after_publish")
RANK_0_POINTS = ("save.before_manifest", "save.before_publish", "save.after_publish", "retain.unpublished")
"""Fail points that only rank 0 reaches."""
MAX_RECOVERY_RANKS = 4
MAX_SEQUENCE = 32
"""The most tokens per sample: recovery depends on the state, not on its size."""


def kill_points() -> list[str]:
    """The fail points at which the run is killed, in the order of the kills."""
    return [
        *(f"step.{phase}" for phase in STEP_POINTS),
        *(f"save.{part}" for part in SAVE_POINTS),
        "retain.unpublished",
        "start.restore",
        "start.restored",
    ]


def kill_schedule(ranks: int) -> tuple[str, int]:
    """The faults, one kill per attempt, each one step later and on the next rank; and the steps that the run needs."""
    faults = []
    for restart, point in enumerate(kill_points()):
        rank = 0 if point in RANK_0_POINTS else restart % ranks
        # Loading and deleting a checkpoint belong to no step of the run: the first time counts.
        step = "" if point.startswith(("start", "retain")) else f"@step{restart + 1}"
        faults.append(f"{point}:rank{rank}:kill{step}#{restart}")
    return ",".join(faults), len(faults) + 3


def check_recovery(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """Compares an undisturbed run with one that is killed at every fail point."""
    layout, _ = scale_layout(config.layout, MAX_RECOVERY_RANKS)
    ranks = Layout.from_config(layout).ranks
    faults, steps = kill_schedule(ranks)
    proof, note = scale_config(config, layout, steps)
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as base:
        undisturbed, killed = RunFolder(Path(base) / "undisturbed"), RunFolder(Path(base) / "killed")
        run(proof, undisturbed)
        with environment(MESHWRIGHT_FAULT=faults):
            run(proof, killed)
        kills = [incident for incident in read_incidents(killed) if incident.error_type == "Killed"]
        last, expected = newest_checkpoint(killed), newest_checkpoint(undisturbed)
        same = state_digest(last) == state_digest(expected)
        difference = "" if same else f"; first difference: {next(compare_checkpoints(expected, last), 'none')}"
        yield (
            f"{Layout.from_config(layout)}{describe_settings(proof)}: a run killed with SIGKILL at "
            f"{len(kill_points())} fail points ends with bitwise the same state as an undisturbed run",
            same and len(kills) == len(kill_points()),
            f"{len(kills)} kills (phases {kill_phases(kills)}); state digest {state_digest(last)[:16]}, expected "
            f"{state_digest(expected)[:16]}{difference}{note}",
        )
        yield check_step_records(undisturbed, killed, steps)
        yield check_damaged_checkpoint(proof, killed, state_digest(expected))


def check_step_records(undisturbed: RunFolder, killed: RunFolder, steps: int) -> tuple[str, bool, str]:
    """The events: every step is recorded once, with bitwise the loss of the undisturbed run."""
    records, expected = completed_steps(killed.events(0)), completed_steps(undisturbed.events(0))
    missing = sorted(set(range(steps)) - records.keys())
    different = [step for step in sorted(records) if records[step]["loss"] != expected.get(step, {}).get("loss")]
    passed = not missing and not different and len(records) == steps
    measured = f"{len(records)} of {steps} steps recorded; losses differ at {different or 'no step'}"
    return "every step is recorded once, with bitwise the loss of the undisturbed run", passed, measured


def check_damaged_checkpoint(config: RunConfig, folder: RunFolder, expected: str) -> tuple[str, bool, str]:
    """Flips one bit of the newest checkpoint: the run must resume from an older one and end with the same state."""
    damaged = newest_checkpoint(folder)
    shard = folder.root / damaged.folder / "rank-00000.shard"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run(config, folder)
    replaced = newest_checkpoint(folder)
    passed = state_digest(replaced) == expected and replaced.attempt > damaged.attempt
    return (
        "a checkpoint with one flipped bit is never loaded",
        passed,
        f"{damaged.name} was skipped, {replaced.name} was written again",
    )


def scale_config(config: RunConfig, layout: LayoutConfig, steps: int) -> tuple[RunConfig, str]:
    """The config with the same structure and small sizes, and a note on what was scaled down."""
    mesh = Layout.from_config(layout)
    config = replace(config, pipeline=limit_stages(config))
    model, note = scale_model(config, mesh)
    samples = (accumulation_steps(config, mesh) if mesh.pipeline > 1 else 2) * mesh.data_degree
    sequence = scale_sequence(config, mesh, min(config.data.sequence, MAX_SEQUENCE))
    proof = replace(
        config,
        steps=steps,
        model=model,
        data=replace(config.data, sequence=sequence),
        batch=replace(config.batch, global_=samples, micro=1),
        schedule=replace(config.schedule, warmup=min(config.schedule.warmup, 3)),
        layout=layout,
        fsdp=fit_reshard_degree(config.fsdp, min_shard_group_size(mesh)),
        eval=replace(config.eval, every=5, samples=4),
        checkpoint=CheckpointConfig(mode="sync", seconds=0, every=1, keep=2),
        launch=replace(config.launch, device="cpu", restarts=3),
    )
    if config.ddp.static_graph:  # DDP with static_graph cannot accumulate
        proof = replace(proof, batch=replace(proof.batch, micro=2))
    validate(proof)
    return proof, (
        f"; {steps} steps of {samples} x {sequence} tokens on CPU" + (f", model scaled down ({note})" if note else "")
    )


def run(config: RunConfig, folder: RunFolder) -> None:
    """Trains as `meshwright train` does, without output."""
    job = make_job(config, folder)

    def start(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork=False))

    supervise(
        folder, config.launch, start, lambda _attempt: NullViewer(), report=lambda _text: None, raise_on_signal=True
    )


def newest_checkpoint(folder: RunFolder) -> CheckpointEntry:
    return list_published(open_run_store(folder))[0]


def kill_phases(kills: list[Incident]) -> str:
    return ", ".join(dict.fromkeys(kill.phase for kill in kills))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the duration of the context."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NullViewer:
    """A viewer that shows nothing."""

    def tick(self) -> None:
        pass

    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
