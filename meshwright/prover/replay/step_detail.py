"""What a replay shows of a step: parameters, modules, samples, and the comparison with the record. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

COMPARED = ("loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped")
"""The fields of a step record that a replay compares bit for bit."""
CULPRIT_DEVIATIONS = 8.0
"""A sample is to blame for a step's loss if its own loss is so many robust deviations above the median."""
MIN_SAMPLES = 4
"""Samples that a step needs for a median that one of them does not decide."""
NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""


@dataclass(frozen=True)
class ParameterDetail:
    """One parameter in one step."""

    name: str
    layer: str
    """the block that it belongs to, or its module"""
    elements: int
    gradient_norm: float
    """of the unscaled gradient, before clipping"""
    largest_gradient: float
    nonfinite_gradients: int
    weight_norm: float
    """before the update"""
    update_norm: float
    """of the difference that the update made"""


@dataclass(frozen=True)
class ModuleDetail:
    """The output of one module in the forward passes of one step, over all ranks and micro-batches."""

    name: str
    block: bool
    """whether it is a block of the model"""
    rms: float
    """the root mean square of its elements"""
    largest: float
    nonfinite: int
    """elements that are not finite"""


@dataclass(frozen=True)
class SampleDetail:
    """One sample of a step."""

    sample: int
    source: str
    index: int
    """its index in the source"""
    loss: float
    """mean over its valid targets, before the update and without dropout"""
    targets: int
    text: str = ""
    """the beginning of its text, or of its tokens"""


@dataclass(frozen=True)
class StepReplay:
    """One step of a run, run again."""

    step: int
    checkpoint: str
    """name of the checkpoint that the replay began at; empty: the initial state"""
    first_step: int
    """the step that the replay began at"""
    layout: str
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    loss_scale: float | None
    skipped: bool
    record: dict[str, Any] | None
    """what the run recorded of the step; None if it recorded nothing"""
    differences: dict[str, tuple[Any, Any]]
    """field -> (replayed, recorded), where they differ"""
    parted_at: int | None
    """the first step since `first_step` that differs from its record"""
    parameters: list[ParameterDetail]
    """in model order"""
    modules: list[ModuleDetail]
    """in the order of computation"""
    samples: list[SampleDetail]
    """in the order of the stream"""
    notes: list[str] = field(default_factory=list)
    deterministic: bool = True
    """whether the run used deterministic algorithms, so that a replay is bitwise equal to the record"""

    @property
    def equals_record(self) -> bool | None:
        """Whether every replayed step is bitwise equal to its record; None if the step has no record."""
        return None if self.record is None else self.parted_at is None

    @property
    def culprit(self) -> SampleDetail | None:
        """The sample whose loss stands out, if there is one."""
        return find_culprit(self.samples)

    @property
    def first_nonfinite(self) -> str:
        """The first module whose output is not finite, else the last parameter in model order with such a gradient: the
        backward pass reaches it first.
        """
        modules = [module.name for module in self.modules if module.nonfinite]
        parameters = [p.name for p in self.parameters if p.nonfinite_gradients]
        return modules[0] if modules else f"{parameters[-1]} (in backward)" if parameters else ""

    def layers(self) -> dict[str, tuple[float, float, float]]:
        """Layer -> the norms of its gradient, its weights and its update."""
        squares: dict[str, list[float]] = {}
        for p in self.parameters:
            found = squares.setdefault(p.layer, [0.0, 0.0, 0.0])
            for index, norm in enumerate((p.gradient_norm, p.weight_norm, p.update_norm)):
                found[index] += norm**2
        return {layer: (a**0.5, b**0.5, c**0.5) for layer, (a, b, c) in squares.items()}

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"equals_record": self.equals_record, "first_nonfinite": self.first_nonfinite}
        layers = [
            {"layer": layer, "gradient_norm": gradient, "weight_norm": weight, "update_norm": update}
            for layer, (gradient, weight, update) in self.layers().items()
        ]
        return values | {"layers": layers, "culprit": asdict(self.culprit) if self.culprit is not None else None}


def find_culprit(samples: list[SampleDetail]) -> SampleDetail | None:
    """The sample whose loss stands out from those of the other samples: by `CULPRIT_DEVIATIONS` robust deviations, and
    alone. A loss that is not finite stands out from finite ones.
    """
    counted = [sample for sample in samples if sample.targets]
    if len(counted) < MIN_SAMPLES:
        return None
    broken = [sample for sample in counted if sample.loss - sample.loss != 0]
    if broken:
        return broken[0] if len(broken) == 1 else None
    *others, highest = sorted(counted, key=lambda sample: sample.loss)
    losses = [sample.loss for sample in others]
    middle = median(losses)
    spread = NORMAL_MAD * median(abs(loss - middle) for loss in losses)
    stands_out = highest.loss - middle > CULPRIT_DEVIATIONS * max(spread, 1e-3 * abs(middle))
    return highest if stands_out and highest.loss - others[-1].loss > (highest.loss - middle) / 2 else None
