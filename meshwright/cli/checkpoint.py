"""`meshwright checkpoint`: lists, verifies and compares the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from meshwright.cli.args import AtStep, Json, Run, option, positional
from meshwright.cli.output import emit


def checkpoint_list(run: Run, json: Json = False) -> None:
    """Checkpoint list: list the checkpoints of a run, newest first, with size, layout and status."""
    from meshwright.checkpoint.inspect import list_rows

    rows = list_rows(run)
    lines = [
        f"{row['name']}  timeline {row['timeline']}  {row['bytes']:,} bytes in {row['files']} files  "
        + (" x ".join(f"{axis} {degree}" for axis, degree in row["layout"].items() if degree > 1) or "one rank")
        + f"  {row['status']}{base_text(row)}"
        if "bytes" in row
        else f"{row['name']}  {row['status']}"
        for row in rows
    ]
    emit(json, {"checkpoints": rows}, "\n".join(lines) or f"{run} has no checkpoint")


def base_text(row: Mapping[str, Any]) -> str:
    """The frozen parameters that a checkpoint refers to, as the end of a line."""
    return f"  without frozen parameters ({row['base']['digest']}, {row['base']['weights']})" if "base" in row else ""


def checkpoint_verify(run: Run, step: AtStep = None, json: Json = False) -> None:
    """Checkpoint verify: check every byte of the published checkpoints against its digest; exit 4 if one is damaged."""
    from meshwright.checkpoint.inspect import verify_rows
    from meshwright.checkpoint.verify import Damage

    rows = verify_rows(run, step)
    lines = [f"{row['name']}  intact{base_text(row)}" for row in rows if not row["damage"]]
    lines += [f"{row['name']}  DAMAGED  {Damage(**damage)}" for row in rows for damage in row["damage"]]
    emit(json, {"checkpoints": rows}, "\n".join(lines))
    if any(row["damage"] for row in rows):
        raise SystemExit(4)


def checkpoint_digest(run: Run, step: AtStep = None, json: Json = False) -> None:
    """Checkpoint digest: print one digest of all unsharded tensors; it does not depend on the layout."""
    from meshwright.checkpoint.inspect import digest

    answer = digest(run, step)
    emit(json, answer, answer["digest"])


def checkpoint_diff(
    run: Run,
    other: Annotated[Path, positional("OTHER", "another run folder, or the folder of a checkpoint")],
    step: AtStep = None,
    other_step: Annotated[int | None, option("N", "step of the other checkpoint (default: the same)")] = None,
    json: Json = False,
) -> None:
    """Checkpoint diff: list the tensors in which two checkpoints differ, and by how much; exit 1 if any does."""
    from meshwright.checkpoint.inspect import diff

    answer = diff(run, other, step, other_step)
    lines = [difference["text"] for difference in answer["differences"]]
    emit(json, answer, "\n".join(lines) or f"{answer['one']} and {answer['other']} have the same tensors")
    if answer["differences"]:
        raise SystemExit(1)
