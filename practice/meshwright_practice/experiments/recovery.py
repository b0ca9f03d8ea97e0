"""Recovery: what a restart needs, what a kill costs, and which signals notice a run that makes no progress."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.base.history.goodput import goodput
from meshwright.core.checkpoint.inspect import run_config
from meshwright.core.data.sample_lookup import open_sample_lookup
from meshwright.core.weights.export import export_checkpoint
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.small_runs import SmallRun, scratch_folder, train_small
from meshwright_practice.pictures import Bars, Curves

STEPS, STOP = 6, 3
SIZES = ("model.layers=1", "batch.global=4", "schedule.kind=constant", "optimizer.lr=0.02")
ONE_RANK = (*SIZES, "layout.replicate=1")


def other_seeds(manifest: Manifest) -> Manifest:
    return replace(manifest, rng={name: seed + 1 for name, seed in manifest.rng.items()})


def without_moments(manifest: Manifest) -> Manifest:
    kept = {name: tensor for name, tensor in manifest.tensors.items() if not name.startswith("optimizer/")}
    return replace(manifest, tensors=kept)


LOSSES: dict[str, Callable[[Manifest], Manifest]] = {
    "optimizer": without_moments,
    "data": lambda manifest: replace(manifest, data=manifest.data | {"position": 0, "step": 0}),
    "rng": other_seeds,
    "schedule": lambda manifest: replace(manifest, schedule={"step": 0, "lr": 0.0}),
    "identity": lambda manifest: replace(manifest, identity={}),
}
"""Field of a checkpoint -> the checkpoint without it, as a save that forgets the field would have written it."""


def newest_manifest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir()) / MANIFEST_FILE


def killed_run(root: Path, steps: int = STEPS, stop: int = STOP) -> SmallRun:
    """A run that was killed after `stop` steps, and has one checkpoint, of that step."""
    settings, faults = (*ONE_RANK, *saves_at(stop)), f"step.fetch:rank0:kill@step{stop}"
    return train_small(root, *settings, steps=steps, faults=faults, may_fail=True)


def saves_at(step: int) -> tuple[str, ...]:
    return "checkpoint.mode=sync", "checkpoint.seconds=0", f"checkpoint.every={step}"


def drop_one(_knobs: Knobs) -> Observation:
    """Resumes from a checkpoint in which one field is lost, one field after the other."""
    refused: dict[str, float] = {}
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *ONE_RANK, steps=STEPS)
        killed_run(folder / "killed")
        for field, lose in LOSSES.items():
            run = folder / field
            shutil.copytree(folder / "killed", run)
            path = newest_manifest(run)
            path.write_bytes(lose(Manifest.decode(path.read_bytes())).encode())
            done = train_small(run, *ONE_RANK, *saves_at(STOP), steps=STEPS, may_fail=True)
            refused[field] = float(done.error is not None)
        resumed = train_small(folder / "killed", *ONE_RANK, *saves_at(STOP), steps=STEPS)
        difference = max(abs(a - b) for a, b in zip(resumed.losses(), whole.losses(), strict=True))
        same_bits = float(resumed.digest == whole.digest)
    values = {f"refused_without_{field}": value for field, value in refused.items()}
    values |= {
        "refused": sum(refused.values()),
        "fields": float(len(refused)),
        "intact_loss_difference": difference,
        "intact_same_bits": same_bits,
    }
    labels = (*refused, "nothing")
    picture = Bars("resume without one field", "refused", labels, {"refused": (*refused.values(), 0.0)})
    return Observation(values, picture, ("A refused resume says which field differs, with both values.",))


def weights_only(knobs: Knobs) -> Observation:
    """Restarts a killed run from its weights alone, and from its full checkpoint."""
    stop, steps = int(knobs["stop"]), 2 * int(knobs["stop"])
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *ONE_RANK, steps=steps)
        killed_run(folder / "killed", steps, stop)
        exported = folder / "weights"
        export_checkpoint(folder / "killed", exported, run_config(folder / "killed"), format="safetensors")
        full = train_small(folder / "killed", *ONE_RANK, *saves_at(stop), steps=steps)
        weights = train_small(folder / "weights-only", *ONE_RANK, f"init_from={exported}", steps=steps - stop)
        expected, found, resumed = whole.losses()[stop:], weights.losses(), full.losses()[stop:]
        first_samples = samples_in(whole, range(stop))
        again = samples_in(weights, range(steps - stop))
        norms = [run.steps()[step]["grad_norm"] for run, step in ((whole, stop), (weights, 0))]
    values = {
        "difference_full": max(abs(a - b) for a, b in zip(expected, resumed, strict=True)),
        "difference_weights_only": max(abs(a - b) for a, b in zip(expected, found, strict=True)),
        "replayed_samples": float(len(first_samples & again)),
        "samples_before_the_kill": float(len(first_samples)),
        "same_bits_full": float(full.digest == whole.digest),
        "same_bits_weights_only": float(weights.digest == whole.digest),
        "gradient_norm_difference": abs(norms[0] - norms[1]),
    }
    x = tuple(float(step) for step in range(stop, steps))
    lines = {"undisturbed": tuple(expected), "full checkpoint": tuple(resumed), "weights only": tuple(found)}
    return Observation(values, Curves("loss after the restart", "step", "loss", x, lines))


def samples_in(run: SmallRun, steps: range) -> set[int]:
    lookup = open_sample_lookup(run.root)
    return {one for step in steps for one in lookup.show(step)["samples"]}


def killed_save(knobs: Knobs) -> Observation:
    """Kills a rank with SIGKILL while a checkpoint is saved; the supervisor restarts the job."""
    point, at = str(knobs["point"]), int(knobs["at"])
    settings = (*SIZES, *saves_at(2), "layout.replicate=2", "launch.restarts=1")
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *settings, steps=STEPS)
        run = train_small(folder / "killed", *settings, steps=STEPS, faults=f"{point}:rank1:kill@step{at}")
        account = goodput(run.history, time.time())
        recorded = len(run.events("step"))
        restored = float(run.events("restored")[-1]["step"])
        [incident] = [one for one in run.incidents() if one.outcome == "failed"]
        values = {
            "same_bits": float(run.digest == whole.digest),
            "steps": float(STEPS),
            "steps_recorded": float(recorded),
            "steps_run_again": float(recorded - STEPS),
            "restored_step": restored,
            "killed_at": float(at),
            "killed_rank": float(-1 if incident.rank is None else incident.rank),
            "attempts": float(len(run.incidents())),
            "unique_samples": account.unique_samples,
            "samples_processed": float(sum(event["samples"] for event in run.events("step"))),
        }
        parts = {part: seconds for part, seconds in account.parts.items() if seconds}
    picture = Bars("goodput account", "s", ("killed run",), {part: (seconds,) for part, seconds in parts.items()})
    return Observation(values, picture, (f"Rank 1 was killed at {point}.",))


def signals(knobs: Knobs) -> Observation:
    """Runs that complete every step and still make little progress: skipped updates, and replayed steps."""
    every, steps = int(knobs["nan_every"]), 8
    settings = (*ONE_RANK, "numerics.on_nonfinite=skip", "launch.restarts=3")
    with scratch_folder() as folder:
        runs = {
            "healthy": train_small(folder / "healthy", *settings, steps=steps),
            "skipping": train_small(
                folder / "skipping", *settings, steps=steps, faults=f"step.backward:rank0:nan@every{every}"
            ),
            "replaying": train_small(
                folder / "replaying", *settings, steps=steps, faults="step.fetch:rank0:kill@step3x2"
            ),
        }
        counted = {name: count_progress(run) for name, run in runs.items()}
    values: dict[str, float] = {"steps": float(steps)}
    for name, (completed, processed, useful) in counted.items():
        values |= {f"{name}_steps": completed, f"{name}_samples": processed, f"{name}_useful_samples": useful}
        values[f"{name}_goodput"] = useful / processed
    labels = tuple(counted)
    parts = {
        "useful": tuple(useful for _, _, useful in counted.values()),
        "not useful": tuple(processed - useful for _, processed, useful in counted.values()),
    }
    notes = ("A useful sample is one of a step that the run keeps and whose update was applied, counted once.",)
    return Observation(values, Bars("samples processed", "samples", labels, parts), notes)


def count_progress(run: SmallRun) -> tuple[float, float, float]:
    """The steps that ranks completed, the samples in them, and those that reached the final parameters once."""
    recorded = run.events("step")
    kept = [event for event in run.steps().values() if not event.get("skipped")]
    samples, useful = (float(sum(event["samples"] for event in events)) for events in (recorded, kept))
    return float(len(recorded)), samples, useful


def identity(_knobs: Knobs) -> Observation:
    """Resumes a killed run with one changed setting: of its placement, then of its identity."""
    changes = {
        "ranks": "layout.replicate=2",
        "micro-batch": "batch.micro=2",
        "seed": "seed=1",
        "global batch": "batch.global=8",
        "optimizer": "optimizer.kind=sgd",
    }
    accepted: dict[str, float] = {}
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *ONE_RANK, steps=STEPS)
        killed_run(folder / "killed")
        differences: list[float] = []
        for name, setting in changes.items():
            run = folder / name.replace(" ", "-")
            shutil.copytree(folder / "killed", run)
            done = train_small(run, *ONE_RANK, *saves_at(STOP), setting, steps=STEPS, may_fail=True)
            accepted[name] = float(done.error is None)
            if done.error is None:
                differences += [abs(a - b) for a, b in zip(done.losses(), whole.losses(), strict=True)]
    values: dict[str, Any] = {
        f"accepted_{name.replace(' ', '_').replace('-', '_')}": value for name, value in accepted.items()
    }
    values |= {"loss_difference_accepted": max(differences)}
    picture = Bars(
        "resume with one changed setting", "accepted", tuple(accepted), {"accepted": tuple(accepted.values())}
    )
    return Observation(values, picture, ("Placement may change; identity may not.",))


def silent_failure(_knobs: Knobs) -> Observation:
    """Flips one bit of a parameter on one of two ranks, without and with comparisons of the replicas."""
    settings = (*SIZES, "layout.replicate=2")
    fault = "step.fetch:rank1:flip@step2"
    with scratch_folder() as folder:
        whole = train_small(folder / "whole", *settings, steps=STEPS)
        blind = train_small(folder / "blind", *settings, "numerics.compare_every=0", steps=STEPS, faults=fault)
        compared = train_small(
            folder / "compared", *settings, "numerics.compare_every=1", steps=STEPS, faults=fault, may_fail=True
        )
        gap = max(abs(a - b) for a, b in zip(blind.losses(), whole.losses(), strict=True))
        values = {
            "blind_run_completes": float(blind.error is None),
            "blind_loss_gap": gap,
            "loss": whole.losses()[-1],
            "blind_same_bits": float(blind.digest == whole.digest),
            "compared_run_stops": float(compared.error is not None),
            "steps_before_the_comparison_stops": float(len(compared.steps())),
            "steps": float(STEPS),
        }
        x = tuple(float(step) for step in range(STEPS))
        lines = {"undisturbed": tuple(whole.losses()), "one flipped bit": tuple(blind.losses())}
    note = str(compared.error) if compared.error is not None else ""
    return Observation(values, Curves("loss", "step", "loss", x, lines), (note,))
