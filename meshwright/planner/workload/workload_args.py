"""What the words of `meshwright plan` ask for: a workload, with what was assumed; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.config import RunConfig, config_from_dict, config_to_dict, load_config
from meshwright.config.dtypes import COMPUTE_BYTES, PRECISIONS
from meshwright.errors import ConfigError
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.resolve_model import resolve_model
from meshwright.planner.workload.workload import SEARCHED_KEYS, Workload

USUAL_TOKENS = 4 << 20
"""of a step, where nobody says: what published runs of large models begin with"""
USUAL_SEQUENCE = 4096


def build_workload(
    word: str,
    overrides: Sequence[str] = (),
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
) -> Workload:
    """A word for each of the three settings that the figures hang on most; the rest of the run by its keys."""
    split = [text.removeprefix("--").partition("=") for text in overrides]
    pinned = {key: value for key, _, value in split if key in SEARCHED_KEYS}
    words = [text for text, (key, _, _) in zip(overrides, split, strict=True) if key not in SEARCHED_KEYS]
    named = resolve_model(word, words)
    run = named.run_config
    if run is None and named.model_config is not None:
        run = config_from_dict({"model": config_to_dict(named.model_config), "precision": {"compute": "bf16"}})
        batch, sequence = usual(batch, sequence)
    notes = [named.note] if named.note else []
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision} is not known", f"allowed: {', '.join(PRECISIONS)}")
    if run is None:
        usual_batch, usual_sequence = usual(batch, sequence)
        if batch is None:
            notes.append(f"batch assumed: {usual_batch:,} samples of {usual_sequence:,} tokens a step")
        whole = pins(pinned)
        return Workload(named.architecture, usual_batch, usual_sequence, precision or "bf16", None, whole, tuple(notes))
    tree: dict[str, Any] = config_to_dict(run)
    tree["batch"] |= {"micro": None, **({"global": batch} if batch is not None else {})}
    tree["data"] |= {"sequence": sequence} if sequence is not None else {}
    if precision in COMPUTE_BYTES:
        tree["precision"]["compute"] = precision
    run = config_from_dict(tree)
    if precision is not None and precision not in COMPUTE_BYTES:
        notes.append(f"{precision} is estimated alone: meshwright trains in {', '.join(COMPUTE_BYTES)}")
    base = run if precision is None or precision in COMPUTE_BYTES else None
    return Workload(
        named.architecture,
        run.batch.global_,
        run.data.sequence,
        precision or run.precision.compute,
        base,
        pins(pinned),
        tuple(notes),
    )


def workload_from_config(run: RunConfig, overrides: Sequence[str] = ()) -> Workload:
    """A run's own, with what `--KEY=VALUE` words pin of what is searched."""
    split = [text.removeprefix("--").partition("=") for text in overrides]
    pinned = pins({key: value for key, _, value in split if key in SEARCHED_KEYS})
    free = replace(run, batch=replace(run.batch, micro=None))
    model = Architecture.from_config(run.model, run.preset)
    return Workload(model, run.batch.global_, run.data.sequence, run.precision.compute, free, pinned)


def usual(batch: int | None, sequence: int | None) -> tuple[int, int]:
    sequence = sequence or USUAL_SEQUENCE
    return batch or max(1, USUAL_TOKENS // sequence), sequence


def pins(pinned: dict[str, str]) -> dict[str, int | str]:
    """What words fix of what is searched, each checked as the run's own key would be."""
    found: dict[str, int | str] = {}
    for key, value in pinned.items():
        room, _, name = key.partition(".")
        lone = {"layout.shard_degree": {"shard": "optimizer"}}.get(key, {})
        config = load_config(None, [f"--{key}={value}", *(f"--{room}.{k}={v}" for k, v in lone.items())])
        given = getattr(getattr(config, room), name)
        if given is not None:
            found[key] = given
    return found
