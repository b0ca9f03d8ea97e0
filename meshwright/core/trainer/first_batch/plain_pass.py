"""A plain pass over the first samples in one process, with which ranks compare that of the parallelized model."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.base.config import PrecisionConfig, RunConfig
from meshwright.core.parallel.materialize import named_tensors
from meshwright.core.trainer.custom_model import MODEL_PREFIX, CustomModel
from meshwright.core.trainer.first_batch.batch_check import seeded
from meshwright.core.trainer.first_batch.first_samples import FIRST_PART, MIN_SEQUENCE, Flat, parameter_count
from meshwright.core.trainer.first_batch.gradient_sketch import GradientSketch, PlainPass
from meshwright.core.trainer.first_batch.model_notes import dtype_name
from meshwright.core.trainer.objective import Objective
from meshwright.core.trainer.precision import Precision

MAX_SECONDS = 10.0
"""Processor time of the passes that are compared."""
PASSES = 15
"""Forward passes that they take, a backward pass counted as two."""
BYTES = 48
"""Bytes per parameter of the copies and gradients that exist at once."""
SCALES = (1.0, 2.0**-8, 2.0**-16)
"""Factors of the loss in fp16, of which the first one with finite gradients is taken, as the loss scale of steps is."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Computed:
    """The loss and the gradients of one pass."""

    loss: float
    gradients: dict[str, Tensor]

    def norm(self, name: str) -> float:
        return float(self.gradients[name].double().norm()) if name in self.gradients else 0.0

    def error(self, name: str, other: Computed) -> float:
        """The norm of the difference of two gradients; a missing one is zero."""
        if name not in self.gradients or name not in other.gradients:
            return self.norm(name) + other.norm(name)
        return float((self.gradients[name].double() - other.gradients[name].double()).norm())

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(math.isfinite(self.norm(name)) for name in self.gradients)

    def difference(self, other: Computed, tolerance: float, without: frozenset[str]) -> str:
        """`loss` or the name of the first gradient that differs; an empty text if none does."""
        if not abs(self.loss - other.loss) <= tolerance * abs(self.loss):
            return "loss"
        names = [n for n in {**self.gradients, **other.gradients} if n.removeprefix(MODEL_PREFIX) not in without]
        floor = tolerance * math.hypot(*(self.norm(name) for name in names))
        wrong = (name for name in names if not self.error(name, other) <= tolerance * self.norm(name) + floor)
        return next(wrong, "")


def run_pass(objective: Objective, flat: Flat, precision: Precision | None = None, scale: float = 1.0) -> Computed:
    """Forward and backward of a batch. `scale` multiplies the loss before backward, and divides the gradients."""
    with seeded(0):
        with (precision or Precision(PrecisionConfig(compute="fp32"), CPU)).autocast():
            total = objective.compute(flat).total
        (total * scale).backward()
    gradients = {n: p.grad.div_(scale) for n, p in objective.named_parameters() if p.grad is not None}
    return Computed(float(total.detach()), gradients)


def affordable_rows(objective: Objective, custom: CustomModel, flat: Flat) -> tuple[Flat | None, str]:
    """The rows of a batch for which all passes stay within `MAX_SECONDS` and the free memory, or why there are none."""
    free = available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if (needed := BYTES * parameter_count(custom)) > free:
        return None, f"that needs {needed >> 20:,} MiB of memory, and {free >> 20:,} MiB are free"
    few = first_rows(flat, FIRST_PART)
    begin = time.process_time()
    with torch.no_grad(), seeded(0):
        objective.compute(few)
    seconds = PASSES * (time.process_time() - begin)
    for candidate in (flat, few):
        if seconds * len(candidate[0]) / max(1, len(few[0])) <= MAX_SECONDS:
            return candidate, ""
    return None, f"that would take {seconds:.0f} s on a CPU"


def available_bytes() -> int:
    """The memory of the host that processes can allocate: free, or of caches that the kernel gives back."""
    try:
        return 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_rows(flat: Flat, count: int) -> Flat:
    """The first rows of a batch, or all of them where an entry is not one row per sample."""
    return tuple(t[:count] for t in flat) if all(t.ndim and len(t) == len(flat[0]) for t in flat) else flat


def why_incomparable(custom: CustomModel, config: RunConfig, *, shortened: bool) -> str:
    """Why ranks cannot compute of the first samples what one process does; an empty text if they can. `shortened`:
    their sequences are cut.
    """
    layout = config.layout
    weights = Precision(config.precision, CPU).parameters
    if config.init_from:
        return "the initial weights are those of init_from"
    if config.precision.float8:
        return "the layers compute in float8"
    if shortened and (MIN_SEQUENCE % layout.tensor or MIN_SEQUENCE % (2 * layout.context)):
        return "its sequences are cut, and the layout divides them into more parts"
    if any(t.is_meta and t.is_floating_point() and t.dtype != weights for _, t in named_tensors(custom.module)):
        return f"init writes other values into tensors of {dtype_name(weights)}"
    return ""


def make_plain_pass(custom: CustomModel, flat: Flat, dtype: torch.dtype, config: PrecisionConfig) -> PlainPass | str:
    """The pass of a copy, or why ranks cannot compare theirs with it."""
    objective = custom.build_objective(CPU, dtype)
    training = not is_random(objective, flat)
    if not training and is_random(objective.eval(), flat):
        return "forward draws random numbers in evaluation mode too"
    precision = Precision(config, CPU)

    def compute(dtype: torch.dtype, precision: Precision | None = None, scale: float = 1.0) -> Computed:
        copied = custom.build_objective(CPU, dtype)
        return run_pass(copied if training else copied.eval(), flat, precision, scale)

    exact = compute(dtype)
    if not exact.is_finite:
        return "the loss or a gradient is not finite"
    for scale in SCALES if config.compute == "fp16" else SCALES[:1]:
        rounded = compute(precision.parameters, precision, scale)
        if rounded.is_finite or not math.isfinite(rounded.loss):
            break
    if not rounded.is_finite:
        return f"the pass in {config.compute} is not finite"
    errors = {name: exact.error(name, rounded) for name in exact.gradients}
    sketches = {
        name: GradientSketch.of(gradient, errors[name] / max(exact.norm(name), 1e-300))
        for name, gradient in exact.gradients.items()
    }
    return PlainPass(
        flat,
        exact.loss,
        abs(exact.loss - rounded.loss) / max(abs(exact.loss), 1e-300),
        sketches,
        training,
        scale,
        norm=math.hypot(*(sketch.norm for sketch in sketches.values())),
        error=math.hypot(*errors.values()),
        weights=math.hypot(*(float(p.detach().double().norm()) for p in objective.parameters())),
    )


@torch.no_grad()
def is_random(objective: Objective, flat: Flat) -> bool:
    """Whether the loss depends on the seed."""
    losses = []
    for seed in (0, 1):
        with seeded(seed):
            losses.append(float(objective.compute(flat).total))
    return losses[0] != losses[1]
