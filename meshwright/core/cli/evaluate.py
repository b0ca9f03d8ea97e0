"""meshwright evaluate: loss, perplexity and metrics of a checkpoint on another data set or on held-out samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, AtStep, Json, Ranks, option, positional
from meshwright.base.terminal.output import emit


def evaluate(
    run: Annotated[Path, positional("RUN", "run folder; it is only read")],
    step: AtStep = None,
    ranks: Ranks = None,
    samples: Annotated[
        int | None,
        option("N", "number of samples (default: all of another data set, eval.samples of the held-out ones)"),
    ] = None,
    json: Json = False,
    overrides: tuple[str, ...] = (),
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Evaluate: loss, perplexity and metrics of a checkpoint on other data (--data.kind=...) or on held-out samples."""
    from dataclasses import asdict

    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.core.api.evaluation import evaluate_run

    result = evaluate_run(run, overrides, ranks, step, samples, load_user_code(entry_points))
    which = "held-out samples of the run" if result.held_out else "samples"
    text = (
        f"{result.checkpoint}  loss {result.loss:.6f}  perplexity {result.perplexity:.6g}  "
        f"on {result.tokens:,} tokens of {result.samples:,} {which}"
    )
    emit(json, asdict(result), "\n".join([text, *(f"{name} {value:.6g}" for name, value in result.metrics.items())]))
