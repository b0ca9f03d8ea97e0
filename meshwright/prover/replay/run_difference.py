"""Where two runs part: the settings that differ, and the first difference in the order of computation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.base.records.events import Event
from meshwright.core.trainer.identity import describe_differences
from meshwright.errors import ConfigError

SIZES = (
    "vocab",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "tie",
    "experts",
    "experts_shared",
    "family",
    "options",
)
MODEL_KEYS = ("model", "lora.rank", "lora.targets", *(f"model.{key}" for key in SIZES))
"""Settings that decide the names and shapes of the parameters."""
BIT_KEYS: tuple[str, ...] = (
    *("layout.", "batch.", "pipeline.", "context.", "compile.", "activation_checkpoint.", "ddp.", "fsdp."),
    *("launch.threads", "launch.device", "optimizer.cpu_offload"),
)
"""Settings that may change the last bits without being identity: the order of summation depends on them."""
MACHINE_KEYS = ("torch", "device", "threads", "precision")
"""Fields of a start record that may change the last bits."""

QUANTITIES = {
    "state": "the parameters differ before it",
    "samples": "the samples that it reads differ",
    "forward": "parameters and samples are equal, and the loss differs",
    "gradient": "the loss is equal, and gradients differ",
    "update": "gradients are equal, and the update differs",
}
"""What may differ first in a step, in the order of computation, with its meaning."""


@dataclass(frozen=True)
class StepDigests:
    """What one run computed in one step."""

    samples: tuple[str, ...]
    """a digest of every sample, in global order"""
    loss: float | None
    gradients: dict[str, str]
    """parameter -> digest of its gradient"""


@dataclass(frozen=True)
class RunDigests:
    """The replayed steps of one run."""

    parameters: dict[int, dict[str, str]]
    """number of completed steps -> parameter -> digest"""
    steps: dict[int, StepDigests]
    records: dict[int, Event]
    """step -> the fields of its record that are compared"""


@dataclass(frozen=True)
class FirstDifference:
    """The first quantity in which two replays differ."""

    step: int
    quantity: str
    """a key of QUANTITIES"""
    parameter: str
    """the first parameter that differs, in model order; '' if none does"""
    count: int
    """the number of parameters that differ"""


@dataclass(frozen=True)
class RunDifference:
    """The answer of `meshwright bisect`."""

    common_steps: int
    """steps that both runs have recorded"""
    settings: dict[str, tuple[Any, Any]]
    """what differs in the identity, the placement and the machine"""
    recorded_step: int | None = None
    """the first step whose records differ"""
    recorded: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """the fields of that record that differ"""
    equal_checkpoint: int | None = None
    """the newest common checkpoint whose tensors are equal, in completed steps"""
    different_checkpoint: int | None = None
    """the oldest common checkpoint that is known to differ"""
    first: FirstDifference | None = None
    """the first difference of the replays; None if they agree"""
    reproduced: tuple[bool, bool] | None = None
    """whether the replay of each run is bitwise equal to its records, and to the checkpoint that differs; None if
    nothing was replayed"""
    parameter: str = ""
    """the first parameter that differs, in model order"""
    elements: int = 0
    largest: float = 0.0
    relative: float = 0.0
    """how many of its elements differ, the largest difference, and that relative to the largest value"""

    @property
    def agree(self) -> bool:
        return self.recorded_step is None and self.different_checkpoint is None and self.first is None

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step between which the runs part; None if they agree."""
        if self.agree:
            return None
        if self.first is not None:
            return self.first.step, self.first.step
        bounds = [self.recorded_step, self.different_checkpoint and self.different_checkpoint - 1]
        last = min(step for step in bounds if step is not None)
        return min(last, self.equal_checkpoint or 0), last

    @property
    def step(self) -> int | None:
        """The step in which the runs part; None if they agree, or if it is known only between which steps."""
        return self.steps[0] if self.steps is not None and self.steps[0] == self.steps[1] else None

    def to_json(self) -> dict[str, Any]:
        return {"agree": self.agree, "step": self.step, "steps": self.steps, **asdict(self)}


def require_same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises a ConfigError unless two identities have parameters of the same names and shapes."""
    before, now = ({key: values[key] for key in MODEL_KEYS if key in values} for values in (one, other))
    if before != now:
        raise ConfigError(
            f"the runs train different models: {describe_differences(before, now)}", "expected two runs of one model"
        )


def different_settings(
    one: Mapping[str, Any], other: Mapping[str, Any], starts: tuple[Event, Event]
) -> dict[str, tuple[Any, Any]]:
    """What may explain a difference, from two identity records and the start records of the runs."""
    found: dict[str, tuple[Any, Any]] = {}
    for part in ("identity", "placement"):
        before, now = (record.get(part) or {} for record in (one, other))
        for key in sorted(before.keys() | now.keys()):
            matters = part == "identity" or key.startswith(BIT_KEYS)
            if matters and before.get(key) != now.get(key):
                found[key] = before.get(key), now.get(key)
    codes = [(record.get("code") or {}).get("fingerprint") for record in (one, other)]
    if codes[0] != codes[1]:
        found["code of the model"] = codes[0], codes[1]
    for key in MACHINE_KEYS:
        if starts[0] and starts[1] and starts[0].get(key) != starts[1].get(key):
            found[f"machine: {key}"] = starts[0].get(key), starts[1].get(key)
    return found


def find_first_difference(one: RunDigests, other: RunDigests) -> FirstDifference | None:
    """The first difference of two replays in the order of computation; None if all common steps agree."""
    common = sorted(one.parameters.keys() & other.parameters.keys())
    if not common:
        return None
    if names := differing(one.parameters[common[0]], other.parameters[common[0]]):
        return FirstDifference(common[0], "state", names[0], len(names))
    for step in sorted(one.steps.keys() & other.steps.keys()):
        if step < common[0]:
            continue
        a, b = one.steps[step], other.steps[step]
        gradients = differing(a.gradients, b.gradients)
        first = gradients[0] if gradients else ""
        if a.samples != b.samples:
            return FirstDifference(step, "samples", first, len(gradients))
        if a.loss != b.loss:
            return FirstDifference(step, "forward", first, len(gradients))
        if gradients:
            return FirstDifference(step, "gradient", first, len(gradients))
        if step + 1 not in one.parameters.keys() & other.parameters.keys():
            return None  # a replay ends with a step that is not finite
        if names := differing(one.parameters[step + 1], other.parameters[step + 1]):
            return FirstDifference(step, "update", names[0], len(names))
    return None


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The names whose digests differ, in model order."""
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
