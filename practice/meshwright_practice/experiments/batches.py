"""Batches: what one step does, how micro-batches add up, and what a larger global batch changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.base.config import IGNORE_INDEX, BatchConfig, derive_batch
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.telemetry.comm_counter import CommCounter
from meshwright.core.trainer.records.step_counters import count_step
from meshwright.errors import ConfigError
from meshwright.testing import World, run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import RankTraining, run_trainings, small_config
from meshwright_practice.experiments.small_runs import SmallRun, scratch_folder, train_small
from meshwright_practice.pictures import Bars, Curves

POSITIONS = 4
SHORT_LOSS, LONG_LOSS = 1, 4
"""The mean token loss of the short and of the long micro-batch."""
HELD_OUT = 64
"""Held-out samples per evaluation."""


class OneWeight(nn.Module):
    """One weight w; the loss of a token with target t is w * t, so that the gradient is the mean of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * torch.ones_like(x)


def loss_sum(outputs: Tensor, target: Tensor) -> Tensor:
    return torch.where(target == IGNORE_INDEX, 0.0, outputs * target).sum()


def loss_mean(outputs: Tensor, target: Tensor) -> Tensor:
    return loss_sum(outputs, target) / (target != IGNORE_INDEX).sum()


def sample(tokens: int, loss: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A sample with so many valid targets, whose mean token loss is `loss`."""
    targets = np.where(np.arange(POSITIONS) < tokens, loss, IGNORE_INDEX)
    return np.zeros(POSITIONS), targets.astype(np.int64)


def accumulation(knobs: Knobs) -> Observation:
    """The gradient of two micro-batches with unequal numbers of valid tokens: in the trainer, with accumulation and on
    two ranks, and as DDP computes it from the mean loss of every rank.
    """
    short, micro_batches = int(knobs["short_tokens"]), int(knobs["micro_batches"])
    samples = [sample(short, SHORT_LOSS), sample(POSITIONS, LONG_LOSS)]
    short_alone, long_alone = map(gradient_of_mean, samples)
    with scratch_folder() as folder:
        accumulated, on_two_ranks = (gradient(folder / f"ranks-{n}", samples, n) for n in (1, 2))
    unequal, equal, every, last = run_ranks(ddp_gradients, 2, samples, micro_batches)[0]
    values = {
        "short_alone": short_alone,
        "long_alone": long_alone,
        "token_mean": (short * short_alone + POSITIONS * long_alone) / (short + POSITIONS),
        "mean_of_means": (short_alone + long_alone) / 2,
        "sum_of_means": short_alone + long_alone,
        "trainer_accumulated": accumulated,
        "trainer_two_ranks": on_two_ranks,
        "ddp": unequal,
        "ddp_equal_tokens": equal,
        "all_reduces_without_no_sync": float(every[0]),
        "all_reduces_with_no_sync": float(last[0]),
        "bytes_without_no_sync": float(every[1]),
        "bytes_with_no_sync": float(last[1]),
        "micro_batches": float(micro_batches),
    }
    labels = ("token mean", "trainer, accumulated", "trainer, 2 ranks", "mean of means", "DDP, mean per rank")
    bars = tuple(values[key] for key in ("token_mean", "trainer_accumulated", "trainer_two_ranks", "mean_of_means"))
    picture = Bars("gradient of one weight", "loss per token", labels, {"gradient": (*bars, unequal)})
    return Observation(values, picture, (f"The short micro-batch has {short} valid tokens, the long one {POSITIONS}.",))


def gradient_of_mean(one: Any) -> float:
    """The gradient of the mean loss of one micro-batch, in one process."""
    model, (x, target) = OneWeight(), map(torch.from_numpy, one)
    loss_mean(model(x), target).backward()
    assert model.w.grad is not None
    return float(model.w.grad)


def gradient(root: Path, samples: list[Any], ranks: int) -> float:
    """The gradient norm that the trainer records for one step over these samples, in micro-batches of one sample."""
    user = UserCode(OneWeight, loss_sum, samples)
    settings = (f"batch.global={len(samples)}", "batch.micro=1", f"layout.replicate={ranks}", "eval.holdout=0")
    return float(train_small(root, *settings, steps=1, user=user).steps()[0]["grad_norm"])


def ddp_gradients(world: World, samples: list[Any], micro_batches: int) -> Any:
    """DDP's gradient of the mean loss per rank, for unequal and equal token counts; then its all-reduces per step."""
    batches = [tuple(map(torch.from_numpy, one)) for one in samples]
    grads = []
    for batch in (batches[world.rank], batches[-1]):
        model = DistributedDataParallel(OneWeight())
        loss_mean(model(batch[0]), batch[1]).backward()
        weight = next(model.parameters())
        assert weight.grad is not None
        grads.append(float(weight.grad))
    counts = []
    for no_sync in (False, True):
        model = DistributedDataParallel(OneWeight())
        with CommCounter({}) as counter:
            for index in range(micro_batches):
                skip = no_sync and index + 1 < micro_batches
                context: AbstractContextManager[Any] = model.no_sync() if skip else nullcontext()
                with context:
                    loss_mean(model(batches[1][0]), batches[1][1]).backward()
        rows = [row for row in counter.rows() if row.collective == "all_reduce"]
        counts.append((sum(row.calls for row in rows), sum(row.message_bytes for row in rows)))
    return *grads, *counts


def one_step(knobs: Knobs) -> Observation:
    """Runs one step of the trainer on two ranks, under DDP and under FSDP2, and counts its phases and collectives."""
    micro_batches = int(knobs["accumulation"])
    sizes = (f"--batch.global={4 * micro_batches}", "--batch.micro=2")
    configs = [small_config(2, *sizes, f"--layout.shard={shard}") for shard in ("none", "parameters")]
    (phases, ddp), (_, fsdp) = (of_config[0] for of_config in run_trainings(configs, count_phases))
    values = {f"{phase}_phases": float(phases.get(phase, 0)) for phase in ("fetch", "forward", "backward", "update")}
    values |= {
        "accumulation": float(micro_batches),
        "ddp_gradient_collectives": float(sum(n for (axis, _), n in ddp.items() if axis != "control")),
        "ddp_control_collectives": float(sum(n for (axis, _), n in ddp.items() if axis == "control")),
        "fsdp_collectives": float(sum(n for (axis, _), n in fsdp.items() if axis != "control")),
        "fsdp_all_gathers": float(sum(n for (_, name), n in fsdp.items() if name == "all_gather")),
        "fsdp_reduce_scatters": float(sum(n for (_, name), n in fsdp.items() if name == "reduce_scatter")),
    }
    names = tuple(sorted({name for name, _ in [*ddp, *fsdp]} | {"control"}))
    rows = {
        "DDP": tuple(float(sum(n for (axis, _), n in ddp.items() if axis == name)) for name in names),
        "FSDP2": tuple(float(sum(n for (axis, _), n in fsdp.items() if axis == name)) for name in names),
    }
    notes = (f"{micro_batches} micro-batches per step and rank; the step control vector and the loss are `control`.",)
    return Observation(values, Bars("collectives of one step", "calls", names, rows), notes)


def count_phases(training: RankTraining) -> tuple[Counter[str], dict[tuple[str, str], int]]:
    """The phases that the second step enters, and its collectives by axis."""
    training.run()
    phases: Counter[str] = Counter()
    with count_step(training.model, training.optimizer) as counters:

        def enter(phase: str) -> None:
            phases[phase] += 1
            counters.enter(phase)

        training.run(enter)
    return phases, {(row.axis, row.collective): row.calls for row in counters.rows()}


def algebra(knobs: Knobs) -> Observation:
    """Trains on four ranks of which some share their samples, and compares the recorded batch with both formulas."""
    tensor, pipeline = (2, 1) if knobs["axis"] == "tensor" else (1, 2) if knobs["axis"] == "pipeline" else (1, 1)
    micro, steps = int(knobs["micro"]), int(knobs["accumulation"])
    data = 4 // (tensor * pipeline)
    wanted = micro * data * steps
    settings = (f"layout.replicate={data}", f"layout.tensor={tensor}", f"layout.pipeline={pipeline}")
    with scratch_folder() as folder:
        run = train_small(folder / "run", *settings, f"batch.global={wanted}", f"batch.micro={micro}")
        recorded, layout = float(run.steps()[1]["samples"]), Layout.from_config(run.config.layout)
        tokens = float(run.steps()[1]["tokens"])
    values = {
        "ranks": float(layout.ranks),
        "data_degree": float(layout.data_degree),
        "samples_per_step": recorded,
        "tokens_per_step": tokens,
        "micro_x_ranks_x_accumulation": float(micro * layout.ranks * steps),
        "micro_x_data_x_accumulation": float(micro * layout.data_degree * steps),
        "smallest_global_batch": float(smallest_batch(layout.data_degree)),
        "accumulation": float(steps),
        "accumulation_on_twice_the_ranks": float(derive_batch(run.config.batch, 2 * data).accumulation),
    }
    labels = ("recorded", "micro x ranks x accumulation", "micro x data-parallel degree x accumulation")
    parts = (recorded, values["micro_x_ranks_x_accumulation"], values["micro_x_data_x_accumulation"])
    notes = (f"{layout}: ranks of one {knobs['axis']} group read the same samples.",)
    return Observation(values, Bars("samples per step", "samples", labels, {"samples": parts}), notes)


def smallest_batch(data_degree: int) -> int:
    """The smallest global batch that the config accepts for a data-parallel degree."""
    for size in range(1, 2 * data_degree + 1):
        try:
            return derive_batch(BatchConfig(size), data_degree).global_
        except ConfigError:
            continue
    raise AssertionError("unreachable")


def batch_sweep(knobs: Knobs) -> Observation:
    """Trains on equal numbers of samples in small and in large batches, and with equal numbers of steps."""
    small, factor = int(knobs["batch"]), int(knobs["factor"])
    steps = int(knobs["samples"]) // small
    runs: dict[str, SmallRun] = {}
    with scratch_folder() as folder:
        for name, batch, count, rate in (
            ("loss_small", small, steps, 1),
            ("loss_large", small * factor, steps // factor, 1),
            ("loss_large_higher_rate", small * factor, steps // factor, factor**0.5),
            ("loss_equal_steps", small * factor, steps, 1),
        ):
            runs[name] = train_small(
                folder / name,
                "data.kind=stdlib",
                "data.sequence=16",
                "model.vocab=256",
                "model.layers=1",
                f"optimizer.lr={0.01 * rate}",
                "schedule.kind=constant",
                "eval.every=100000",  # after the last step
                f"eval.samples={HELD_OUT}",
                f"batch.global={batch}",
                "layout.replicate=2",
                steps=count,
            )
        values = {
            "updates_small": float(steps),
            "updates_large": float(steps // factor),
            "samples": float(steps * small),
            **{name: float(run.events("end")[0]["evaluations"][-1][1]) for name, run in runs.items()},
            "training_loss_equal_steps": float(np.mean(runs["loss_equal_steps"].losses()[-8:])),
            "noise_scale": float(np.median([e["noise_scale"] for e in runs["loss_small"].events("step")][-10:])),
            "activation_ratio": ratio(runs, lambda run: run.peak_memory()["activation"]),
            "gradient_bytes_ratio": ratio(runs, lambda run: run.collectives()["replicate", "all_reduce"]["wire_bytes"]),
            "optimizer_ratio": ratio(runs, lambda run: run.peak_memory()["optimizer"]),
            "factor": float(factor),
        }
        losses = {name: run.losses() for name, run in runs.items()}
    points = 8
    lines = {
        name.removeprefix("loss_").replace("_", " "): tuple(
            loss[max(0, len(loss) * (i + 1) // points - 1)] for i in range(points)
        )
        for name, loss in losses.items()
        if name != "loss_equal_steps"
    }
    x = tuple(values["samples"] * (i + 1) / points for i in range(points))
    return Observation(values, Curves("loss over samples", "samples", "loss", x, lines))


def ratio(runs: Mapping[str, SmallRun], value: Callable[[SmallRun], float]) -> float:
    """What the counters of the large batch saw, divided by what those of the small batch saw."""
    return value(runs["loss_large"]) / value(runs["loss_small"])
