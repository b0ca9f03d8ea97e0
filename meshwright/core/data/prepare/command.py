"""`meshwright data prepare` as a function: its arguments are validated, and its result is a dict. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.base.config import SourceConfig
from meshwright.core.data.prepare.inputs import find_inputs
from meshwright.core.data.prepare.prepare import MAX_SHARD_TOKENS, Preparation, prepare_shards
from meshwright.core.data.tokenization import find_tokenizer
from meshwright.errors import ConfigError

MAX_WORKERS = 1024


def prepare_folder(
    inputs: Sequence[str],
    out: Path,
    tokenizer: str,
    format: str,
    field: str,
    template: str,
    end_of_document: str,
    workers: int | None,
    shard_tokens: int,
    bad_sample_budget: int,
) -> dict[str, Any]:
    """Writes the shards of the inputs to `out`, and describes them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, MAX_WORKERS) if workers is None else workers
    ranges = {"--workers": (workers, 1, MAX_WORKERS), "--shard-tokens": (shard_tokens, 1, MAX_SHARD_TOKENS)}
    ranges["--bad-sample-budget"] = (bad_sample_budget, 0, 1 << 20)
    for name, (value, minimum, maximum) in ranges.items():
        if not minimum <= value <= maximum:
            raise ConfigError(f"{name} {value} is out of range", f"expected {minimum} to {maximum}")
    if template and format != "chat":
        raise ConfigError("--template has no effect", "expected --format chat with it")
    files = find_inputs(inputs, "records" if format == "chat" else format)
    source = SourceConfig(
        kind="chat" if format == "chat" else "text",
        path=", ".join(inputs),
        tokenizer=str(find_tokenizer(tokenizer)) if tokenizer else "",
        end_of_document=end_of_document,
        field=field,
        chat_template=template,
    )
    index = prepare_shards(
        Preparation.of(files, source, shard_tokens=shard_tokens),
        out,
        workers=workers,
        skip_budget=bad_sample_budget,
        hint="try to correct it, or --bad-sample-budget N, which skips N lines or rows",
        empty_hint=f"try another INPUT or {'--template' if format == 'chat' else '--field'}",
    )
    return {
        "folder": str(out),
        "tokens": index.tokens,
        "documents": index.documents,
        "shards": len(index.shards),
        "dtype": index.dtype,
        "skipped": index.skipped,
        "digest": index.digest,
    }
