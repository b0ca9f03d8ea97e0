"""`meshwright checkpoint`: lists, verifies, compares and exports the checkpoints of a run, and imports weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.base.cli.args import AtStep, Json, Run, flag, option, positional
from meshwright.base.terminal.output import emit


def checkpoint_list(run: Run, json: Json = False) -> None:
    """Checkpoint list: list the checkpoints of a run, newest first, with size, layout and status."""
    from meshwright.core.checkpoint.inspect import list_rows

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
    """Checkpoint verify: check the bytes of the published checkpoints, and what a resume reads; exit 4 for damage."""
    from meshwright.core.checkpoint.inspect import verify_rows
    from meshwright.core.checkpoint.verify import Damage

    rows = verify_rows(run, step)
    lines = [f"{row['name']}  intact{base_text(row)}" for row in rows if not row["damage"]]
    lines += [f"{row['name']}  DAMAGED  {Damage(**damage)}" for row in rows for damage in row["damage"]]
    emit(json, {"checkpoints": rows}, "\n".join(lines))
    if any(row["damage"] for row in rows):
        raise SystemExit(4)


def checkpoint_digest(run: Run, step: AtStep = None, json: Json = False) -> None:
    """Checkpoint digest: print one digest of all unsharded tensors; it does not depend on the layout."""
    from meshwright.core.checkpoint.inspect import digest

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
    from meshwright.core.checkpoint.inspect import diff

    answer = diff(run, other, step, other_step)
    lines = [difference["text"] for difference in answer["differences"]]
    emit(json, answer, "\n".join(lines) or f"{answer['one']} and {answer['other']} have the same tensors")
    if answer["differences"]:
        raise SystemExit(1)


def checkpoint_export(
    run: Run,
    to: Annotated[Path, option("DIR", "new folder for the export")],
    step: AtStep = None,
    format: Annotated[
        Literal["huggingface", "safetensors", "torch"] | None,
        option(
            "FORMAT",
            "huggingface: a folder that transformers loads; safetensors or torch: by the model's own names "
            "(default: huggingface, or safetensors for a custom model)",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        option("DTYPE", "dtype of floating-point tensors (default: that of the checkpoint)"),
    ] = None,
    max_shard_size: Annotated[str, option("SIZE", "largest size of one file, such as 500MB or 5GB")] = "5GB",
    adapter: Annotated[bool, flag("write the low-rank factors alone, as an adapter of PEFT")] = False,
    json: Json = False,
) -> None:
    """Checkpoint export: write the weights of a checkpoint as safetensors that transformers loads."""
    from dataclasses import asdict

    from meshwright.base.io import format_bytes
    from meshwright.core.checkpoint.inspect import run_config
    from meshwright.core.weights.export import export_checkpoint, parse_size

    limit = parse_size(max_shard_size)
    done = export_checkpoint(
        run, to, run_config(run), step=step, dtype=dtype, format=format, max_shard_bytes=limit, adapter=adapter
    )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    text = f"exported {done.checkpoint} to {to}: {done.tensors} tensors, {format_bytes(done.bytes)} in {files}"
    emit(json, asdict(done) | {"folder": str(done.folder)}, f"{text}; digest {done.digest[:16]}")


def checkpoint_import(
    folder: Annotated[Path, positional("DIR", "folder of a Hugging Face model: safetensors and config.json")],
    run: Annotated[Path, option("RUN", "new run folder")],
    json: Json = False,
) -> None:
    """Checkpoint import: verify a folder of weights and copy it into a new run folder, as its initial weights."""
    from dataclasses import asdict

    from meshwright.base.io import format_bytes
    from meshwright.core.weights.import_folder import import_folder

    done = import_folder(folder, run)
    text = f"imported {done.tensors} tensors, {format_bytes(done.bytes)}, to {run}; digest {done.digest[:16]}"
    emit(json, asdict(done) | {"folder": str(done.folder)}, f"{text}; next: meshwright train {run} --run {run}")
