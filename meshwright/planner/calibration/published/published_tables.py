"""Reads tables of measured runs whose columns differ from the records of `plan --replay`.

vTrain (VIA-Research/vTrain, MIT) publishes its single-node measurements as a table with these columns. Its runs have
full activation checkpointing on one node of A100 and the vocabulary of GPT-2, and are predicted as Megatron-LM's of
2021, like its runs on several nodes (`SOFTWARE` in `published_software.py`).
"""

from __future__ import annotations

import csv
import io
from itertools import islice
from typing import Any

from meshwright.errors import ConfigError

COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
"""Column of vTrain's table -> field of a run."""
SECONDS = "iteration time (ms)"


def read_table(content: str, what: str, max_rows: int) -> list[dict[str, Any]]:
    """Returns the first rows of vTrain's table as records of runs; raises ConfigError if it is another table."""
    reader = csv.DictReader(io.StringIO(content))
    try:
        missing = [column for column in (*COLUMNS, SECONDS) if column not in (reader.fieldnames or [])]
        if missing:
            raise ConfigError(
                f"{what} is a CSV file without the column {missing[0]!r}", "expected the columns of vTrain's table"
            )
        return [table_run(row, number) for number, row in enumerate(islice(reader, max_rows), start=2)]
    except (TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{what} is not valid: {str(error)[:200]}", "expected a number in every cell") from None


def parse_cell(row: dict[str, str], column: str, line: int) -> float:
    """Returns the number in a cell; raises ValueError that names the cell."""
    try:
        number = float(row[column])
        return int(number) if number.is_integer() else number
    except (TypeError, ValueError):
        raise ValueError(f"line {line} has no number in the column {column!r}") from None


def table_run(row: dict[str, str], line: int) -> dict[str, Any]:
    """One row of the table as the record of a run."""
    values = {field: parse_cell(row, column, line) for column, field in COLUMNS.items()}
    model = {key: values[key] for key in ("hidden", "heads", "layers", "seq")}
    return {
        "id": f"vtrain-single-{line}",
        "source": f"VIA-Research/vTrain single node, line {line}",
        "gpu": "A100-80",
        "gpus": values["gpus"],
        "model": model | {"ffn": 4 * values["hidden"], "gated": False},
        "layout": {axis: values[axis] for axis in ("dp", "tp", "pp")} | {"schedule": "1f1b"},
        "micro_batch": values["micro_batch"],
        "global_batch": values["global_batch"],
        "recompute": "full",
        "reported": {"step_time_s": parse_cell(row, SECONDS, line) / 1000},
    }
