"""Kills this config on this machine at every phase, and holds the result against a run that was never killed."""

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
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import min_shard_group_size, validate

PHASES = ("fetch", "copy", "forward", "backward", "sync", "update", "updated")
SAVES = ("stage", "begin", "write", "after_shard", "before_manifest", "before_publish", "after_publish")
RANK_0_POINTS = ("save.before_manifest", "save.before_publish", "save.after_publish", "retain.unpublished")
MAX_RECOVERY_RANKS = 4
MAX_SEQUENCE = 32
"""Tokens a sample, at most: the proof is about state, not about size."""


def kill_points() -> list[str]:
    """Every point at which the run is killed, in the order of the kills."""
    return [
        *(f"step.{phase}" for phase in PHASES),
        *(f"save.{part}" for part in SAVES),
        "retain.unpublished",
        "start.restore",
        "start.restored",
    ]


def kill_schedule(ranks: int) -> tuple[str, int]:
    """(one kill a launch, each a step further on, ranks taking turns; the steps that such a run needs)."""
    asked = []
    for restart, point in enumerate(kill_points()):
        rank = 0 if point in RANK_0_POINTS else restart % ranks
        # A save belongs to the steps that are done, a deletion to an old checkpoint: whichever comes first.
        where = "" if point.startswith(("start", "retain")) else f"@step{restart + 1}"
        asked.append(f"{point}:rank{rank}:kill{where}#{restart}")
    return ",".join(asked), len(asked) + 3


def check_recovery(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    layout, _ = scale_layout(config.layout, MAX_RECOVERY_RANKS)
    ranks = Layout.from_config(layout).ranks
    faults, steps = kill_schedule(ranks)
    proof, note = scale_config(config, layout, steps)
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as base:
        calm, struck = RunFolder(Path(base) / "calm"), RunFolder(Path(base) / "struck")
        run(proof, calm)
        with environment(MESHWRIGHT_FAULT=faults):
            run(proof, struck)
        kills = [incident for incident in read_incidents(struck) if incident.error_type == "Killed"]
        last, expected = newest_checkpoint(struck), newest_checkpoint(calm)
        same = state_digest(last) == state_digest(expected)
        off = "" if same else f"; first off: {next(compare_checkpoints(expected, last), 'nothing')}"
        yield (
            f"{Layout.from_config(layout)}{describe_settings(proof)} killed with -9 at {len(kill_points())} points"
            " = never killed, every bit",
            same and len(kills) == len(kill_points()),
            f"{len(kills)} kills ({places(kills)}); state {state_digest(last)[:16]} and {state_digest(expected)[:16]}"
            f"{off}{note}",
        )
        yield check_step_records(calm, struck, steps)
        yield check_damaged_checkpoint(proof, struck, state_digest(expected))


def check_step_records(calm: RunFolder, struck: RunFolder, steps: int) -> tuple[str, bool, str]:
    """The ledgers: every step once, each with the loss of the undisturbed run, bit for bit."""
    ours, theirs = completed_steps(struck.events(0)), completed_steps(calm.events(0))
    missing = sorted(set(range(steps)) - ours.keys())
    other = [step for step in sorted(ours) if ours[step]["loss"] != theirs.get(step, {}).get("loss")]
    kept = not missing and not other and len(ours) == steps
    measured = f"{len(ours)} of {steps} steps in the ledger; losses differ at {other or 'no step'}"
    return "every step and its samples once, every loss bitwise the same", kept, measured


def check_damaged_checkpoint(config: RunConfig, folder: RunFolder, expected: str) -> tuple[str, bool, str]:
    """One flipped bit in the newest checkpoint: it must be passed over, and the run end the same from an older one."""
    entry = newest_checkpoint(folder)
    shard = folder.root / entry.folder / "rank-00000.shard"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run(config, folder)
    again = newest_checkpoint(folder)
    kept = state_digest(again) == expected and again.attempt > entry.attempt
    return (
        "a checkpoint with one flipped bit is never loaded",
        kept,
        f"{entry.name} passed over, {again.name} made anew",
    )


def scale_config(config: RunConfig, layout: LayoutConfig, steps: int) -> tuple[RunConfig, str]:
    """The config with its structure kept and its sizes small, and what was made smaller."""
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
    if config.ddp.static_graph:  # DDP's static graph never accumulates
        proof = replace(proof, batch=replace(proof.batch, micro=2))
    validate(proof)
    return proof, f"; {steps} steps of {samples} x {sequence} tokens on CPU" + (f", model {note}" if note else "")


def run(config: RunConfig, folder: RunFolder) -> None:
    job = make_job(config, folder)

    def begin(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork=False))

    supervise(folder, config.launch, begin, lambda _attempt: NullViewer(), report=lambda _text: None)


def newest_checkpoint(folder: RunFolder) -> CheckpointEntry:
    return list_published(open_run_store(folder))[0]


def places(kills: list[Incident]) -> str:
    return ", ".join(dict.fromkeys(kill.phase for kill in kills))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NullViewer:
    """Nobody looks on."""

    def tick(self) -> None:
        pass

    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
