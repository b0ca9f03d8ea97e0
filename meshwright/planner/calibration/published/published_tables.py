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
MAX_LINE = 4096
"""Limit on the characters of a line."""


class InvalidCell(ValueError):
    """A row of the table has not one number per column."""


def read_table(content: str, what: str, max_rows: int) -> list[dict[str, Any]]:
    """Returns the first rows of vTrain's table as records of runs; raises ConfigError if it is another table."""
    expected = "expected the columns of vTrain's table"
    if len(max(content.splitlines(), key=len, default="")) > MAX_LINE:
        raise ConfigError(f"{what} is not valid: a line has more than {MAX_LINE:,} characters", expected)
    reader = csv.DictReader(io.StringIO(content))
    try:
        if missing := [column for column in (*COLUMNS, SECONDS) if column not in (reader.fieldnames or [])]:
            raise ConfigError(f"{what} is a CSV file without the column {missing[0]!r}", expected)
        return [table_run(row, number) for number, row in enumerate(islice(reader, max_rows), start=2)]
    except csv.Error:
        raise ConfigError(f"{what} is not valid: a quoted cell does not end", expected) from None
    except InvalidCell as error:
        raise ConfigError(f"{what} is not valid: {error}", "expected a number in every cell") from None


def parse_cell(row: dict[str | None, Any], column: str, line: int) -> float:
    """Returns the number in a cell; raises InvalidCell that names it."""
    try:
        number = float(row[column])
        return int(number) if number.is_integer() else number
    except (TypeError, ValueError):
        raise InvalidCell(f"line {line} has no number in the column {column!r}") from None


def table_run(row: dict[str | None, Any], line: int) -> dict[str, Any]:
    """One row of the table as the record of a run."""
    if None in row:
        raise InvalidCell(f"line {line} has more cells than the header")
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
