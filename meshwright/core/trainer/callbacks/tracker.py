"""What experiment trackers share: the scalars of a record, and one tracked run through all attempts. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.base.records.events import Event
from meshwright.core.trainer.callbacks.callback import Callback, RunContext


class Tracker(Callback):
    """Logs the scalars of every N-th step and of every evaluation. A subclass opens, writes and closes."""

    def __init__(self, every: int = 10) -> None:
        self.every = every

    def open(self, run: RunContext, settings: Mapping[str, Any]) -> None:
        """Continues the tracked run of this run folder, or starts it."""
        raise NotImplementedError

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self, run: RunContext) -> None:
        raise NotImplementedError

    def on_start(self, record: Event, run: RunContext) -> None:
        self.open(run, dict(flatten(run.config)) | {"parameters": record.get("parameters")})

    def on_step(self, record: Event, _run: RunContext) -> None:
        if record["step"] % self.every == 0:
            self.log(step_scalars(record), record["step"])

    def on_evaluate(self, record: Event, _run: RunContext) -> None:
        values = {"loss": record["loss"], **record.get("metrics", {})}
        self.log({f"eval/{name}": value for name, value in values.items() if value is not None}, record["step"])

    def on_end(self, _record: Event, run: RunContext) -> None:
        self.close(run)


def step_scalars(record: Event) -> dict[str, float]:
    """The scalars of a step's record; values that are not finite are left out."""
    seconds = max(record["seconds"], 1e-9)
    values: dict[str, float | None] = {
        "train/loss": record["loss"],
        "train/grad_norm": record["grad_norm"],
        "train/lr": record["lr"],
        "train/noise_scale": record["noise_scale"],
        "train/loss_scale": record.get("loss_scale"),
        "speed/tokens_per_second": record["tokens"] / seconds,
        "speed/step_seconds": record["seconds"],
        "speed/memory_bytes": record["memory"],
        **{f"phase/{phase}_seconds": spent for phase, spent in record["phases"].items()},
        **{f"train/{name}": value for name, value in record.get("metrics", {}).items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) of every setting; what is neither a number nor text becomes text."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
